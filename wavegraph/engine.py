"""The engine: requests in, one step at a time, outputs out.

Single-threaded: call all methods from one thread. A step reads as three calls in one place (`Engine.step`):
plan, execute, apply.
"""

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

from wavegraph.capture.backends.base import Backend
from wavegraph.capture.executor import Executor
from wavegraph.errors import CaptureError, EngineError, RequestError
from wavegraph.interrupts import interrupts_held
from wavegraph.model.weights import Model
from wavegraph.outputs import RequestMetrics, RequestOutput
from wavegraph.sampling import SamplingParams
from wavegraph.scheduler.checker import Checker
from wavegraph.scheduler.plan import RequestSpec, RequestUpdate, StepPlan, StepResult
from wavegraph.scheduler.scheduler import Scheduler, SchedulerStats
from wavegraph.sizing import Sizes
from wavegraph.tokenizer import TextStream, Tokenizer

Progress = Callable[[int, int], None]
"""Called with (done, total) as long work goes on."""


@dataclass(slots=True)
class _Record:
    """What the engine keeps of a live request beside the scheduler: how to report it."""

    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    token_ids: list[int]
    text: TextStream | None
    metrics: RequestMetrics

    def output(self, request_id: str, finish_reason: str | None, error: str | None = None) -> RequestOutput:
        return RequestOutput(
            request_id=request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            token_ids=tuple(self.token_ids),
            text=self.text.text if self.text is not None else None,
            finish_reason=finish_reason,
            metrics=self.metrics,
            error=error,
        )


class Engine:
    """Runs requests of one model. See `wavegraph.llm.LLM` for the way to make one from a checkpoint.

    ``sizes`` are the limits derived from config and model. Recording the programs happens here; ``progress`` is
    told about it. ``tokenizer`` None means that prompts are token ids and outputs have no text.
    """

    def __init__(
        self,
        model: Model,
        sizes: Sizes,
        *,
        backend: Backend,
        tokenizer: Tokenizer | None = None,
        check: bool = False,
        progress: Progress | None = None,
    ) -> None:
        self.model = model
        self.sizes = sizes
        self.tokenizer = tokenizer
        self.scheduler = Scheduler(sizes.scheduler, sizes.ladder, sizes.coda_ladder)
        self.executor = Executor(model, sizes.limits, sizes.ladder, sizes.coda_ladder, backend)
        self._checker = Checker(sizes.scheduler, sizes.ladder, sizes.coda_ladder) if check else None
        self._records: dict[str, _Record] = {}
        self._undelivered: list[RequestOutput] = []  # of a step that an interrupt followed
        self._broken: str | None = None
        self._closed = False
        self.executor.capture(progress)

    # -- requests ------------------------------------------------------------------------------------------

    def add_request(self, request_id: str, prompt: str | Sequence[int], params: SamplingParams) -> None:
        """Queue a request. Raises `RequestError`, changing nothing, if it cannot be served.

        ``prompt`` is text, which needs a tokenizer, or token ids. An id can be used again once its request ended.
        """
        self._require_working()
        arrival = perf_counter()
        if not isinstance(request_id, str):
            raise RequestError(f"request_id must be a string, got {request_id!r}")
        ids = self._encode(prompt)
        stop = frozenset(self._checked_ids("stop_token_ids", params.stop_token_ids))
        if not params.ignore_eos:
            stop |= frozenset(self.model.config.eos_token_ids)
        spec = RequestSpec(request_id, ids, params.max_tokens, stop)
        self.scheduler.add(spec)
        if self._checker is not None:
            self._checker.add(spec)
        self._records[request_id] = _Record(
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_token_ids=tuple(ids),
            token_ids=[],
            text=self.tokenizer.stream() if self.tokenizer is not None else None,
            metrics=RequestMetrics(arrival),
        )

    def abort(self, request_id: str) -> bool:
        """End a request at once and free what it holds, with no further output; False if it is not live."""
        self._undelivered = [output for output in self._undelivered if output.request_id != request_id]
        live = not self._closed and self.scheduler.cancel(request_id)
        if live:
            self._end(request_id, perf_counter())
        return live

    # -- one step ------------------------------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """Run one step; returns the output so far of each request that has news.

        A step that cannot be launched ends its own requests with ``finish_reason="error"``; the others go on.
        A Ctrl-C is raised when the step is complete; its outputs then come with those of the next one. Raises
        `EngineError` if the engine cannot go on, then and at every later call.
        """
        self._require_working()
        with interrupts_held():
            self._broken = "its last step did not come to an end"  # stays if anything unforeseen happens below
            plan = self.scheduler.plan()
            self._undelivered += self._run(plan) if plan is not None else self._idle()
            self._broken = None
        outputs, self._undelivered = self._undelivered, []
        return outputs

    def _run(self, plan: StepPlan) -> list[RequestOutput]:
        try:
            result = self._execute(plan)
        except CaptureError as error:  # nothing was launched
            return self._fail(plan, str(error))
        return self._report(plan, self.scheduler.apply(plan, result))

    def _execute(self, plan: StepPlan) -> StepResult:
        if self._checker is not None:
            self._checker.check(plan)
        output = self.executor.poll(self.executor.submit(plan))
        return StepResult(plan.step_id, output.tokens)

    def _report(self, plan: StepPlan, updates: list[RequestUpdate]) -> list[RequestOutput]:
        now = perf_counter()
        if self._checker is not None:
            self._checker.complete(plan)
        outputs = []
        for update in updates:
            record = self._records[update.request_id]
            record.token_ids.append(update.token_id)
            if record.metrics.first_token is None:
                record.metrics = replace(record.metrics, first_token=now)
            if record.text is not None and update.finish_reason != "stop":
                record.text.append(update.token_id)
            if update.finish_reason is not None:
                self._end(update.request_id, now)
            outputs.append(record.output(update.request_id, update.finish_reason))
        return outputs

    def _fail(self, plan: StepPlan, reason: str) -> list[RequestOutput]:
        now = perf_counter()
        outputs = []
        for request_id in self.scheduler.fail(plan):
            record = self._records[request_id]
            self._end(request_id, now)
            outputs.append(record.output(request_id, "error", f"request {request_id!r}: {reason}"))
        return outputs

    def _end(self, request_id: str, now: float) -> None:
        record = self._records.pop(request_id)
        record.metrics = replace(record.metrics, finished=now)
        if record.text is not None:
            record.text.finish()
        if self._checker is not None:
            self._checker.end(request_id)

    def _idle(self) -> list[RequestOutput]:
        if self.scheduler.has_unfinished:
            raise EngineError(
                f"{self.scheduler.num_running} running and {self.scheduler.num_waiting} waiting requests, "
                "but no row is ready: the scheduler has lost track of them"
            )
        return []

    @property
    def has_unfinished(self) -> bool:
        """Whether any request waits or runs, or has news that an interrupted `step` could not return."""
        return bool(self._undelivered) or self.scheduler.has_unfinished

    @property
    def stats(self) -> SchedulerStats:
        """Totals since the start; a copy, so that two of them can be subtracted."""
        return replace(self.scheduler.stats)

    def close(self) -> None:
        """Free pools and recorded programs. Live requests get no more output. May be called twice."""
        if not self._closed:
            self._closed = True
            self._records.clear()
            self.executor.close()

    # -- the door ------------------------------------------------------------------------------------------

    def _require_working(self) -> None:
        if self._closed:
            raise EngineError("the engine was closed; make a new one")
        if self._broken is not None:
            raise EngineError(f"the engine cannot go on, because {self._broken}; make a new one")

    def _encode(self, prompt: str | Sequence[int]) -> list[int]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise RequestError(
                    "prompt: text needs a tokenizer, and the checkpoint has none; give a list of token ids"
                )
            ids: Sequence[int] = self.tokenizer.encode(prompt)
        elif isinstance(prompt, list | tuple):
            ids = prompt
        else:
            raise RequestError(f"prompt: must be text or a list of token ids, got {type(prompt).__name__}")
        if not ids:
            raise RequestError("prompt: is empty; give at least one token")
        return self._checked_ids("prompt", ids)

    def _checked_ids(self, field: str, ids: Sequence[Any]) -> list[int]:
        vocab_size = self.model.config.vocab_size
        checked = []
        for index, token in enumerate(ids):
            try:
                value = token if type(token) is int else _index(token)
            except TypeError:
                raise RequestError(f"{field}: token ids must be integers, got {token!r} at index {index}") from None
            if not 0 <= value < vocab_size:
                raise RequestError(
                    f"{field}: token id {value} at index {index} is not in the vocabulary, "
                    f"which ends at {vocab_size - 1}"
                )
            checked.append(value)
        return checked


def _index(token: Any) -> int:
    """An integer of another library as an int. Raises TypeError for anything else, truth values too."""
    if isinstance(token, bool):
        raise TypeError
    return operator.index(token)
