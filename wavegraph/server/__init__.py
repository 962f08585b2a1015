"""The OpenAI-compatible server: `wavegraph.server.app.create_app` over a `wavegraph.server.async_engine.AsyncEngine`.

Nothing of the core imports this package, nor FastAPI, pydantic, msgspec or prometheus, which only it needs.
"""
