"""An engine in a thread of its own, for an event loop that must never wait for a step.

The engine thread alone touches the `Engine`. It takes commands from a queue between steps, and posts each step's
outputs to the event loop in one call. A `Generation` keeps only the latest output of each of its sequences: outputs
are cumulative, so one who reads slowly skips some, loses nothing, and costs no more memory than the text itself.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar

from wavegraph.engine.engine import Engine, Progress
from wavegraph.errors import EngineError, WavegraphError
from wavegraph.outputs import RequestOutput
from wavegraph.sampling import SamplingParams

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
Command = Callable[[Engine], None]

FAILED = "the engine failed and takes no more requests; its supervisor should restart it"
CLOSED = "the engine is shutting down and takes no more requests; ask another"


class Build(Protocol):
    """Makes the engine, on the engine thread; `wavegraph.startup.build.build_engine` with its first arguments given."""

    def __call__(self, *, on_build: Progress, on_load: Progress, on_capture: Progress) -> Engine:
        """Make it, reporting progress."""


class StoppedError(EngineError):
    """The engine was closed while it was being made."""


class Generation:
    """What becomes of the prompts of one call: their sequences, in order, ``n`` for each prompt.

    Belongs to the event loop. `close` it whatever happens: that aborts what still runs.
    """

    def __init__(self, engine: "AsyncEngine", names: Sequence[str]) -> None:
        self._engine = engine
        self._places = {name: place for place, name in enumerate(names)}
        self._running = set(names)
        self._latest: dict[int, RequestOutput] = {}
        self._news: set[int] = set()
        self._failure: str | None = None
        self._changed = asyncio.Event()
        self._ended = asyncio.Event()

    async def news(self) -> list[tuple[int, RequestOutput]]:
        """Latest outputs of sequences, by place, that have grown since the last call; waits until one has.

        Empty once all have ended and been reported. Raises `EngineError` if the engine failed.
        """
        if self._running or self._news:
            await self._changed.wait()
        self._check()
        self._changed.clear()
        grown, self._news = sorted(self._news), set()
        return [(place, self._latest[place]) for place in grown]

    async def finished(self) -> list[RequestOutput]:
        """The last output of every sequence. Raises `EngineError` if the engine failed."""
        await self._ended.wait()
        self._check()
        return [self._latest[place] for place in range(len(self._places))]

    def facts(self) -> dict[str, Any]:
        """What there is to say of it in a log: tokens so far, and why each sequence ended."""
        outputs = self._latest.values()
        reasons = sorted({output.finish_reason or "abort" for output in outputs})
        facts = {"output_tokens": sum(len(output.token_ids) for output in outputs), "finish_reason": ",".join(reasons)}
        errors = [output.error for output in outputs if output.error is not None]
        return facts | ({"error": errors[0]} if errors else {})

    def close(self) -> None:
        """Abort sequences that still run. May be called twice."""
        if self._running:
            self._engine._abandon(self._running)
            self._running = set()
            self._ended.set()

    def _put(self, output: RequestOutput) -> None:
        place = self._places[output.request_id]
        self._latest[place] = output
        self._news.add(place)
        self._changed.set()
        if output.finished:
            self._running.discard(output.request_id)
            if not self._running:
                self._ended.set()

    def _fail(self, reason: str) -> None:
        self._failure = reason
        self._running = set()
        self._changed.set()
        self._ended.set()

    def _check(self) -> None:
        if self._failure is not None:
            raise EngineError(self._failure)


class AsyncEngine:
    """Runs one engine for an event loop. All methods belong to the loop that called `start`.

    ``on_progress`` is called on the engine thread with ``(what, done, total)`` while the engine is being made.
    """

    def __init__(self, build: Build, on_progress: Callable[[str, int, int], None] | None = None) -> None:
        self._build = build
        self._on_progress = on_progress
        self._commands: SimpleQueue[Command] = SimpleQueue()
        self._owners: dict[str, Generation] = {}
        self._calls: set[asyncio.Future[Any]] = set()
        self._counter = 0
        self._draining = False
        self._stopping = False  # read by the engine thread
        self._engine: Engine | None = None
        self._error: BaseException | None = None
        self._up, self._down, self._idle = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._idle.set()

    def start(self) -> None:
        """Start the engine thread, which first makes the engine."""
        self._loop = asyncio.get_running_loop()
        pool = ThreadPoolExecutor(1, "wavegraph-engine")
        thread = pool.submit(self._run)
        thread.add_done_callback(lambda _: self._post(self._on_end, thread.exception()))
        pool.shutdown(wait=False)

    def available(self) -> Engine:
        """The engine if it takes requests, else `EngineError`. Only what never changes may be read here."""
        if self._error is not None:
            raise EngineError(FAILED)
        if self._draining or self._stopping:
            raise EngineError(CLOSED)
        if self._engine is None:
            raise EngineError("the engine is not ready yet; try again later")
        return self._engine

    @property
    def engine(self) -> Engine | None:
        """The engine, once it is made and warm, whatever became of it since; only what never changes may be read."""
        return self._engine

    @property
    def is_ready(self) -> bool:
        """Whether it is made, warm, and takes requests."""
        return self._engine is not None and self._error is None and not self._draining and not self._stopping

    @property
    def error(self) -> BaseException | None:
        """What ended it, unless that was `close`."""
        return self._error

    @property
    def unfinished(self) -> int:
        """Sequences that wait or run."""
        return len(self._owners)

    async def ready(self) -> Engine:
        """Wait until the engine is made and warm. Raises what making it raised."""
        waits = [asyncio.ensure_future(event.wait()) for event in (self._up, self._down)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        if self._engine is None:
            raise self._error if self._error is not None else EngineError(CLOSED)
        return self._engine

    async def ended(self) -> None:
        """Wait until the engine thread has ended, for whatever reason; see `error`."""
        await self._down.wait()

    async def idle(self) -> None:
        """Wait until no sequence is unfinished."""
        await self._idle.wait()

    async def generate(self, prompts: Sequence[Sequence[int]], params: SamplingParams, priority: int = 0) -> Generation:
        """Queue prompts (token ids), all or none; their `Generation` has ``len(prompts) * params.n`` sequences.

        Raises `RequestError` if one cannot be served, `EngineError` if the engine is not ready.
        """
        self.available()
        first = self._counter
        self._counter += len(prompts)
        names = [f"{first + index}#{k}" for index in range(len(prompts)) for k in range(params.n)]
        if params.n == 1:
            names = [str(first + index) for index in range(len(prompts))]
        generation = Generation(self, names)
        self._owners |= dict.fromkeys(names, generation)
        self._idle.clear()
        try:
            await self.call(lambda engine: _add_all(engine, first, prompts, params, priority))
        except BaseException:  # also a cancellation: nobody would own what was queued
            generation.close()
            raise
        return generation

    async def call(self, function: Callable[[Engine], Result]) -> Result:
        """Run ``function`` on the engine thread, between two steps, and raise here what `WavegraphError` it raises.

        Raises `EngineError` if there is no engine (yet, or any more).
        """
        if self._error is not None or self._stopping:
            raise EngineError(FAILED if self._error is not None else CLOSED)
        future: asyncio.Future[Result] = self._loop.create_future()
        self._calls.add(future)
        future.add_done_callback(self._calls.discard)

        def command(engine: Engine) -> None:
            try:
                result = function(engine)
            except WavegraphError as error:
                self._post(_reject, future, error)
            else:
                self._post(_resolve, future, result)

        self._commands.put(command)
        return await future

    def drain(self) -> None:
        """Take no more prompts; what runs goes on. See `idle`."""
        self._draining = True

    async def close(self) -> None:
        """Stop after the current step, and free the engine. What still runs gets an `EngineError`."""
        self._stopping = True
        self._commands.put(lambda _: None)
        await self.ended()

    # -- the engine thread ---------------------------------------------------------------------------------

    def _run(self) -> None:
        engine = self._build(
            on_build=self._progress("compiling operators"),
            on_load=self._progress("loading weights"),
            on_capture=self._progress("recording buckets"),
        )
        try:
            _warm_up(engine)
            self._post(self._on_ready, engine)
            while not self._stopping:
                self._turn(engine)
        finally:
            engine.close()

    def _turn(self, engine: Engine) -> None:
        while not (self._commands.empty() and engine.has_unfinished):
            self._commands.get()(engine)
            if self._stopping:
                return
        outputs = engine.step()
        if outputs:
            self._post(self._deliver, outputs)

    def _progress(self, what: str) -> Progress:
        def report(done: int, total: int) -> None:
            if self._stopping:
                raise StoppedError("the engine was closed while it was being made")
            if self._on_progress is not None:
                self._on_progress(what, done, total)

        return report

    def _post(self, function: Callable[..., None], *arguments: Any) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *arguments)

    # -- the event loop ------------------------------------------------------------------------------------

    def _on_ready(self, engine: Engine) -> None:
        self._engine = engine
        self._up.set()

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            owner = self._owners.get(output.request_id)
            if owner is None:
                continue  # it was abandoned while the step ran
            if output.finished:
                self._forget(output.request_id)
            owner._put(output)

    def _abandon(self, names: set[str]) -> None:
        for name in names:
            self._forget(name)
        doomed = tuple(names)
        self._commands.put(lambda engine: _abort_all(engine, doomed))

    def _forget(self, name: str) -> None:
        self._owners.pop(name, None)
        if not self._owners:
            self._idle.set()

    def _on_end(self, error: BaseException | None) -> None:
        if not self._stopping:
            self._error = error if error is not None else EngineError("the engine thread ended")
            if self._engine is not None:  # whoever waits for `ready` hears of it otherwise
                logger.error("the engine failed", exc_info=self._error)
        reason = EngineError(CLOSED if self._stopping else FAILED)
        for owner in set(self._owners.values()):
            owner._fail(str(reason))
        self._owners.clear()
        self._idle.set()
        for call in tuple(self._calls):
            _reject(call, reason)
        self._down.set()


def _add_all(
    engine: Engine, first: int, prompts: Sequence[Sequence[int]], params: SamplingParams, priority: int
) -> None:
    added: list[str] = []
    try:
        for index, prompt in enumerate(prompts):
            added += engine.add_request(str(first + index), prompt, params, priority=priority)
    except WavegraphError:
        _abort_all(engine, added)
        raise


def _abort_all(engine: Engine, names: Sequence[str]) -> None:
    for name in names:
        engine.abort(name)


def _warm_up(engine: Engine) -> None:
    """Run each program of CODA once through, so that the first request meets nothing for the first time."""
    for name, temperature in (("greedy", 0.0), ("sampled", 1.0)):
        engine.add_request(name, [0], SamplingParams(max_tokens=2, ignore_eos=True, temperature=temperature))
    while engine.has_unfinished:
        engine.step()


def _resolve(future: "asyncio.Future[Any]", result: Any) -> None:
    if not future.done():
        future.set_result(result)


def _reject(future: "asyncio.Future[Any]", error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
