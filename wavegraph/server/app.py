"""The web application: what can be asked, and of whom."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from wavegraph.server.async_engine import AsyncEngine
from wavegraph.server.settings import Settings


def create_app(engine: AsyncEngine, settings: Settings) -> FastAPI:
    """The application over one engine, which it starts, and closes at the end."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        engine.start()
        yield
        await engine.close()

    app = FastAPI(title="Wavegraph", version=version("wavegraph"), lifespan=lifespan, docs_url=None, redoc_url=None)

    @app.get("/health")
    async def health() -> Response:
        """Whether the server is alive: 503 once its engine has failed."""
        return Response(status_code=503 if engine.error is not None else 200)

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        """The one model."""
        return JSONResponse({"object": "list", "data": [{"id": settings.model_name, "object": "model"}]})

    return app
