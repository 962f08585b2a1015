"""Run the server: bind, start, wait for a signal or a failure, drain, and say how it ended."""

import asyncio
import logging
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import uvicorn
from fastapi import FastAPI

from wavegraph.engine.engine import Engine
from wavegraph.errors import ConfigError
from wavegraph.server.app import create_app
from wavegraph.server.async_engine import AsyncEngine, Build
from wavegraph.server.http import HttpProtocol
from wavegraph.server.settings import Settings

logger = logging.getLogger(__name__)

FAILURE_LINGER = 2.0
"""Seconds between a failure of the engine and the end: requests hear of it, and probes of ``/health`` see it."""

CUT_OFF_SECONDS = 3.0
"""For answers that the drain limit cut off to end with an error, and for the engine to finish its step."""

STUCK_SECONDS = 30.0
"""For the engine thread to end once it was told to; a device may hang."""

INTERRUPTED = 130


def bind(host: str, port: int, settings: Settings) -> socket.socket:
    """A socket that listens on ``host:port``, 0 for a free port. Raises `ConfigError` if it cannot be had."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        server = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"host: {host!r} is no address of this machine ({error}); give another") from error
    try:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Connections inherit it: one whose client stopped reading ends, even with its answer complete.
        server.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(settings.stall_timeout * 1000))
        server.bind(address)
    except (OSError, OverflowError) as error:
        server.close()
        raise ConfigError(f"port: {host}:{port} cannot be listened on ({error}); give another") from error
    return server


def serve(build: Build, settings: Settings, listener: socket.socket, *, drain_seconds: float) -> int:
    """Serve until SIGTERM or SIGINT, or until the engine fails; returns the exit code.

    A first signal drains: what runs goes on for at most ``drain_seconds``, everything new is refused with 503. A
    second one cuts off what still runs. Raises what making the engine raised.
    """
    engine = AsyncEngine(build, _Progress().report)
    config = uvicorn_config(create_app(engine, settings), settings)
    with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
        return runner.run(_Run(config, engine, listener, drain_seconds).run())


def uvicorn_config(app: FastAPI, settings: Settings) -> uvicorn.Config:
    """How uvicorn is to run the application."""
    return uvicorn.Config(
        app,
        http=partial(HttpProtocol, settings),  # type: ignore[arg-type]
        loop="uvloop",
        ws="none",
        lifespan="on",
        access_log=False,
        log_config=None,
        server_header=False,
        timeout_keep_alive=75,  # longer than load balancers keep theirs, so that they, not we, end idle connections
        timeout_graceful_shutdown=int(CUT_OFF_SECONDS),
    )


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are ours."""
        yield


class _Run:
    def __init__(self, config: uvicorn.Config, engine: AsyncEngine, listener: socket.socket, drain: float) -> None:
        self._server = _Server(config)
        self._engine = engine
        self._listener = listener
        self._drain_seconds = drain
        self._signals: list[int] = []
        self._asked_to_stop, self._in_a_hurry = asyncio.Event(), asyncio.Event()

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        serving = asyncio.ensure_future(self._server.serve(sockets=[self._listener]))
        try:
            return await self._watch(serving)
        finally:
            self._server.should_exit = True
            done, _ = await asyncio.wait((serving,), timeout=STUCK_SECONDS + self._config_grace)
            if not done:
                logger.critical("the engine thread does not end; leaving without it")
                logging.shutdown()
                os._exit(1)
            serving.result()

    @property
    def _config_grace(self) -> float:
        return float(self._server.config.timeout_graceful_shutdown or 0)

    async def _watch(self, serving: "asyncio.Future[None]") -> int:
        await _first(self._engine.ready(), self._asked_to_stop.wait(), asyncio.shield(serving))
        if not self._asked_to_stop.is_set():
            self._tell_ready(await self._engine.ready())
            await _first(self._engine.ended(), self._asked_to_stop.wait())
        if not self._asked_to_stop.is_set():
            return await self._fail()
        await self._drain()
        if self._engine.error is not None and self._engine.engine is not None:
            return await self._fail()
        logger.info("stopped")
        return INTERRUPTED if self._signals[0] == signal.SIGINT else 0

    def _on_signal(self, number: int) -> None:
        if self._signals:
            self._in_a_hurry.set()
        self._signals.append(number)
        self._asked_to_stop.set()

    async def _fail(self) -> int:
        """Stay a moment, so that everybody hears of it."""
        logger.critical("leaving, since the engine failed")
        await asyncio.sleep(FAILURE_LINGER)
        return 1

    async def _drain(self) -> None:
        count = self._engine.unfinished
        logger.info("draining", extra={"fields": {"unfinished": count, "seconds": self._drain_seconds}})
        self._engine.drain()
        deadline = time.monotonic() + self._drain_seconds
        quiet, hurry, end = self._engine.idle(), self._in_a_hurry.wait(), self._engine.ended()
        await _first(quiet, hurry, end, timeout=self._drain_seconds)
        left = self._engine.unfinished
        if left:
            logger.warning("cutting off what still runs", extra={"fields": {"unfinished": left}})
            await _first(self._engine.close(), timeout=CUT_OFF_SECONDS)
        else:
            self._server.config.timeout_graceful_shutdown = max(int(deadline - time.monotonic()), int(CUT_OFF_SECONDS))

    def _tell_ready(self, engine: Engine) -> None:
        host, port = self._listener.getsockname()[:2]
        sizes = engine.sizes.scheduler
        fields: dict[str, Any] = {
            "address": f"http://{f'[{host}]' if ':' in host else host}:{port}",
            "ladder": ",".join(map(str, engine.sizes.ladder.sizes)),
            "coda_ladder": ",".join(map(str, engine.sizes.coda_ladder.sizes)),
            "pages": sizes.num_pages,
            "tokens": sizes.num_pages * sizes.page_size,
            "pool_bytes": engine.executor.pool_bytes,
        }
        logger.info("ready", extra={"fields": fields})


class _Progress:
    """Logs how far the engine is: the beginning and end of each phase, and once a second between."""

    def __init__(self) -> None:
        self._last: tuple[str, float] = ("", 0.0)

    def report(self, what: str, done: int, total: int) -> None:
        now = time.monotonic()
        if what != self._last[0] or done == total or now >= self._last[1] + 1:
            self._last = (what, now)
            logger.info("starting: %s, %d of %d", what, done, total)


async def _first(*waits: Any, timeout: float | None = None) -> None:
    """Wait until one of them is done, or the time is up; the others are cancelled."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
