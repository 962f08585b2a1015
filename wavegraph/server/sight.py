"""What an operator looks at: ``/metrics``, and ``/dashboard`` with its feed."""

from fastapi import APIRouter
from fastapi.responses import HTMLResponse, PlainTextResponse
from starlette.responses import Response

from wavegraph.engine.engine import Engine
from wavegraph.errors import EngineError
from wavegraph.server.async_engine import AsyncEngine
from wavegraph.server.dashboard import CONTENT_SECURITY_POLICY, Feed, dashboard_page
from wavegraph.server.errors import ApiError, unavailable
from wavegraph.server.metrics import CONTENT_TYPE, Metrics
from wavegraph.server.settings import Settings
from wavegraph.server.stream import EventStream

ERRORS = {
    "description": "An error.",
    "content": {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorBody"}}},
}


def sight_router(engine: AsyncEngine, settings: Settings, feed: Feed) -> APIRouter:
    """The routes, which need no key. ``feed`` must be closed before the engine, and before connections are awaited."""
    router = APIRouter()
    metrics = Metrics(settings.model_name)

    @router.get("/metrics", response_class=PlainTextResponse, responses={"5XX": ERRORS})
    async def show_metrics() -> Response:
        """Counters, gauges and histograms in Prometheus' text format."""
        try:
            if engine.engine is None:
                engine.available()
            stats = await engine.call(Engine.stats)
        except EngineError as error:
            raise unavailable(error) from error
        return Response(metrics.render(stats), media_type=CONTENT_TYPE)

    if settings.dashboard:
        _add_dashboard(router, feed)
    return router


def _add_dashboard(router: APIRouter, feed: Feed) -> None:
    page = dashboard_page()

    @router.get("/dashboard", include_in_schema=False)
    async def show_dashboard() -> Response:
        """The page."""
        return HTMLResponse(page, headers={"Content-Security-Policy": CONTENT_SECURITY_POLICY})

    @router.get("/dashboard/events", include_in_schema=False)
    async def show_events() -> Response:
        """What the page draws, as server-sent events."""
        if feed.is_full:
            raise ApiError(503, "the dashboard is being watched by as many pages as may; close one")
        try:
            return EventStream(feed.watch())
        except EngineError as error:
            raise unavailable(error) from error
