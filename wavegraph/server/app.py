"""The web application: which paths there are, what stands before them, and the document that describes them."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from importlib.metadata import version
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from msgspec import Struct
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from wavegraph.server import responses as answers
from wavegraph.server.async_engine import AsyncEngine
from wavegraph.server.dashboard import Feed
from wavegraph.server.errors import RETRY_AFTER, ApiError, ErrorBody, error_response
from wavegraph.server.guard import REQUEST_ID, Guard
from wavegraph.server.handlers import Handlers
from wavegraph.server.requests import ChatCompletionRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from wavegraph.server.settings import Settings
from wavegraph.server.sight import sight_router

SCHEMAS = "#/components/schemas/"


class Status(Struct):
    """The answer of ``/health`` and ``/ready``."""

    status: str


ANSWERS: tuple[type[Struct], ...] = (
    answers.Completion,
    answers.ChatCompletion,
    answers.ModelList,
    answers.ModelCard,
    answers.Tokens,
    answers.Text,
    answers.Version,
    answers.Load,
    Status,
    ErrorBody,
)
REQUESTS: tuple[type[BaseModel], ...] = (
    CompletionRequest,
    ChatCompletionRequest,
    TokenizeRequest,
    DetokenizeRequest,
)


def create_app(engine: AsyncEngine, settings: Settings) -> FastAPI:
    """The application over one engine, which it starts, and closes at the end."""
    feed = Feed(engine, settings.model_name)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        engine.start()
        try:
            yield
        finally:
            await feed.close()
            await engine.close()

    app = FastAPI(
        title="Wavegraph",
        version=version("wavegraph"),
        lifespan=lifespan,
        docs_url=None,  # its page loads scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.engine, app.state.settings = engine, settings
    app.add_middleware(Guard, settings=settings)
    if settings.allow_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.allow_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=[REQUEST_ID.decode(), "retry-after"],
        )
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(Exception, _on_bug)
    _add_generation(app, Handlers(engine, settings))
    _add_operation(app, engine)
    app.include_router(sight_router(engine, settings, feed))
    app.openapi = partial(_openapi, app, app.openapi)  # type: ignore[method-assign]
    return app


def _add_generation(app: FastAPI, handlers: Handlers) -> None:
    for path, function, takes, gives in (
        ("/v1/completions", handlers.completions, CompletionRequest, answers.Completion),
        ("/v1/chat/completions", handlers.chat_completions, ChatCompletionRequest, answers.ChatCompletion),
        ("/tokenize", handlers.tokenize, TokenizeRequest, answers.Tokens),
        ("/detokenize", handlers.detokenize, DetokenizeRequest, answers.Text),
    ):
        body = {"required": True, "content": _json_of(takes)}
        options: dict[str, Any] = {"methods": ["POST"], "openapi_extra": {"requestBody": body}}
        app.add_api_route(path, function, responses=_documented(gives, takes=True), **options)

    @app.get("/v1/models", responses=_documented(answers.ModelList))
    async def models() -> Response:
        """The one model."""
        return json_response(handlers.models())

    @app.get("/v1/models/{model:path}", responses=_documented(answers.ModelCard))
    async def model(model: str) -> Response:
        """The model of that name."""
        return json_response(handlers.model(model))


def _add_operation(app: FastAPI, engine: AsyncEngine) -> None:
    @app.get("/health", responses=_documented(Status))
    async def health() -> Response:
        """Whether the server is alive: 503 once its engine has failed."""
        failed = engine.error is not None
        return json_response(Status("failed" if failed else "ok"), 503 if failed else 200)

    @app.get("/ready", responses=_documented(Status))
    async def ready() -> Response:
        """Whether requests are taken: the model is loaded, recorded and warm, and the server is not shutting down."""
        if engine.is_ready:
            return json_response(Status("ready"))
        return json_response(Status("draining" if engine.engine is not None else "starting"), 503, RETRY_AFTER)

    @app.get("/version", responses=_documented(answers.Version))
    async def show_version() -> Response:
        """The version of Wavegraph."""
        return json_response(answers.Version(app.version))

    @app.get("/load", responses=_documented(answers.Load))
    async def load() -> Response:
        """How many sequences wait or run."""
        return json_response(answers.Load(engine.unfinished))


def json_response(answer: Struct, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """An answer as JSON."""
    return Response(msgspec.json.encode(answer), status, headers, "application/json")


async def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        message, param = "path: there is nothing at this one; see /openapi.json", "path"
    elif error.status_code == 405:
        message, param = f"method: {request.method} is not what this path takes; see /openapi.json", "method"
    else:
        message, param = str(error.detail), "request"
    return error_response(ApiError(error.status_code, message, param=param, headers=error.headers))


async def _on_bug(request: Request, error: Exception) -> Response:
    """Starlette raises it again behind this answer, and so it is logged."""
    return error_response(ApiError(500, "the server has failed on this request; its log says more"))


# -- the document ------------------------------------------------------------------------------------------


def _json_of(kind: type[Struct] | type[BaseModel]) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": SCHEMAS + kind.__name__}}}


def _documented(gives: type[Struct], takes: bool = False) -> dict[int | str, dict[str, Any]]:
    """Answers of a path: its own, and errors."""
    own: dict[str, Any] = {"description": gives.__doc__ or "", "content": _json_of(gives)}
    if takes and gives in (answers.Completion, answers.ChatCompletion):
        own["content"] = {**own["content"], "text/event-stream": {}}
    errors = {"description": "An error.", "content": _json_of(ErrorBody)}
    if gives is Status:
        return {200: own, 503: own}
    return {200: own, "4XX": errors, "5XX": errors}


def _openapi(app: FastAPI, make: Any) -> dict[str, Any]:
    """FastAPI's document, with our schemas in it."""
    if app.openapi_schema is None:
        document = make()
        _, schemas = msgspec.json.schema_components(ANSWERS, ref_template=SCHEMAS + "{name}")
        for kind in REQUESTS:
            schema = kind.model_json_schema(ref_template=SCHEMAS + "{model}")
            schemas |= schema.pop("$defs", {})
            schemas[kind.__name__] = schema
        components = document.setdefault("components", {}).setdefault("schemas", {})
        components |= schemas
        app.openapi_schema = document
    return app.openapi_schema
