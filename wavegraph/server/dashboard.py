"""``/dashboard``: one page that shows the engine at work, and the feed of events that it draws.

While somebody watches, the engine thread puts each step's plan into a short ring, and twice a second takes a
snapshot of its counters between two steps. All else happens on the event loop, once for all who watch. Nobody
watching costs nothing.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import suppress
from importlib.metadata import version
from time import perf_counter
from typing import Any

import msgspec

from wavegraph.engine.engine import Engine
from wavegraph.engine.histograms import Histogram
from wavegraph.engine.stats import EngineStats
from wavegraph.errors import EngineError
from wavegraph.scheduler.plan import Kind, StepPlan
from wavegraph.server.async_engine import AsyncEngine
from wavegraph.static import UPLOT_NOTICE, read_static

RING = 16
"""Steps of a tick that are shown: the latest. A fast engine makes more than an eye can follow."""

TICK = 0.1
"""Seconds between two events of steps."""

TICKS_PER_POINT = 5
"""Ticks between two events of statistics."""

MAX_WATCHERS = 8
"""Pages that may watch at once."""

BACKLOG = 8
"""Events kept for one who reads slowly; older ones are dropped."""

CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""The page may ask only the server that it came from."""


def dashboard_page() -> str:
    """The page as one HTML document, which holds all that it needs."""
    page = read_static("dashboard.html").replace("UPLOT_NOTICE", UPLOT_NOTICE)
    page = page.replace("/*UPLOT_CSS*/", read_static("uPlot.min.css"))
    return page.replace("/*UPLOT_JS*/", read_static("uPlot.iife.min.js"))


class StepRing:
    """The latest steps: the engine thread puts them in, the event loop takes them out."""

    def __init__(self, size: int = RING) -> None:
        self._steps: deque[tuple[StepPlan, float]] = deque(maxlen=size)

    def step(self, plan: StepPlan, times: tuple[float, float, float, float], waiting: int, free_pages: int) -> None:
        """Keep one step, as `StepObserver` says."""
        self._steps.append((plan, times[3] - times[2]))

    def close(self) -> None:
        """There will be no more steps."""

    def take(self, depths: int) -> list[list[Any]]:
        """Empty the ring, oldest first.

        A step is its number, bucket, rows that may make a token, seconds, and its prompt and decode rows by depth.
        """
        taken = []
        while self._steps:
            plan, seconds = self._steps.popleft()
            rows = ([0] * depths, [0] * depths)
            for task in plan.tasks:
                rows[task.kind is Kind.DECODE][task.depth] += task.token_count
            taken.append([plan.step_id, plan.bucket, len(plan.coda_slot), seconds, *rows])
        return taken


class Feed:
    """Events for all who watch. Belongs to the event loop of ``engine``."""

    def __init__(self, engine: AsyncEngine, model_name: str) -> None:
        self._engine = engine
        self._model_name = model_name
        self._ring = StepRing()
        self._watchers: set[asyncio.Queue[bytes | None]] = set()
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def is_full(self) -> bool:
        """Whether as many watch as may."""
        return len(self._watchers) >= MAX_WATCHERS

    def watch(self) -> AsyncGenerator[bytes]:
        """Server-sent events: first ``hello`` with facts, then ``steps`` and ``stats``, at last ``end``.

        Raises `EngineError` if the engine takes no requests. Close the events that are not read to their end.
        """
        return self._events(_facts(self._engine.available(), self._model_name))

    async def _events(self, facts: dict[str, Any]) -> AsyncGenerator[bytes]:
        queue: asyncio.Queue[bytes | None] = asyncio.Queue(BACKLOG)
        self._watchers.add(queue)
        try:
            yield _event("hello", facts)
            if self._task is None and not self._closed:
                self._task = asyncio.create_task(self._run())
            while not self._closed and (event := await queue.get()) is not None:
                yield event
            yield _event("end", {})
        finally:
            self._watchers.discard(queue)

    async def close(self) -> None:
        """End the feeds of all who watch. May be called twice."""
        self._closed = True
        self._put(None)
        if self._task is not None:
            await self._task

    async def _run(self) -> None:
        try:
            while self._is_watched:
                await self._feed()
        except EngineError:
            pass  # the engine has failed, or was closed
        finally:
            self._task = None
            self._put(None)  # to nobody, unless the engine takes no more requests

    @property
    def _is_watched(self) -> bool:
        return bool(self._watchers) and self._engine.is_ready and not self._closed

    async def _feed(self) -> None:
        """Feed events while somebody watches. Raises `EngineError` once the engine is gone."""
        depths = self._engine.available().sizes.scheduler.depths
        await self._engine.call(lambda engine: engine.observers.append(self._ring))
        try:
            before, then = await self._engine.call(Engine.stats), perf_counter()
            while self._is_watched:
                for _ in range(TICKS_PER_POINT):
                    await asyncio.sleep(TICK)
                    if steps := self._ring.take(depths):
                        self._put(_event("steps", steps))
                stats, now = await self._engine.call(Engine.stats), perf_counter()
                self._put(_event("stats", stats_point(before, stats, then, now, depths)))
                before, then = stats, now
        finally:
            with suppress(EngineError):
                await self._engine.call(lambda engine: engine.observers.remove(self._ring))

    def _put(self, event: bytes | None) -> None:
        for queue in self._watchers:
            if queue.full():
                queue.get_nowait()
            queue.put_nowait(event)


def stats_point(before: EngineStats, after: EngineStats, then: float, now: float, depths: int) -> dict[str, Any]:
    """What happened between two snapshots, taken at ``then`` and ``now`` (seconds of one clock), as plain data."""
    seconds = now - then
    steps, steps_before = after.scheduler, before.scheduler
    return {
        "time": now,
        "seconds": seconds,
        "running": after.running,
        "waiting": after.waiting,
        "held_pages": after.pages - after.free_pages,
        "cached_pages": after.cached_pages,
        "prompt_rate": (steps.prompt_rows - steps_before.prompt_rows) / depths / seconds,
        "output_rate": (after.output_tokens - before.output_tokens) / seconds,
        "steps": steps.core_steps - steps_before.core_steps,
        "rows": steps.rows - steps_before.rows,
        "padding": steps.padding_rows - steps_before.padding_rows,
        "reasons": dict(steps.padding_reasons - steps_before.padding_reasons),
        "hits": {str(size): count for size, count in (after.executor.core.hits - before.executor.core.hits).items()},
        "ttft": _summary(after.latencies.first_token.since(before.latencies.first_token)),
        "itl": _summary(after.latencies.inter_token.since(before.latencies.inter_token)),
        "finished": sum(after.finished.values()),
        "preemptions": after.preemptions,
        "misses": sum(after.executor.core.misses.values()),
    }


def _summary(histogram: Histogram) -> dict[str, float | None]:
    return {"count": histogram.count, "total": histogram.total, "p95": histogram.quantile(0.95)}


def _facts(engine: Engine, model_name: str) -> dict[str, Any]:
    sizes = engine.sizes
    return {
        "model": model_name,
        "version": version("wavegraph"),
        "depths": sizes.scheduler.depths,
        "ladder": list(sizes.ladder.sizes),
        "pages": sizes.scheduler.num_pages,
        "page_size": sizes.scheduler.page_size,
        "max_num_seqs": sizes.scheduler.max_num_seqs,
    }


def _event(name: str, data: Any) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + msgspec.json.encode(data) + b"\n\n"
