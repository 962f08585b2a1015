"""The engine: requests in, one step at a time, outputs out.

Single-threaded: call all methods from one thread. A step reads as three calls in one place (`Engine._advance`):
plan, execute, apply. With asynchronous scheduling up to ``run_ahead`` steps are planned and submitted before the oldest
result is taken; a request that turns out to have ended voids what was planned for it since.
"""

import logging
import secrets
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from time import perf_counter
from typing import Literal

from torch import Tensor

from wavegraph.buckets.cost import CostModel
from wavegraph.capture.backends.base import Backend
from wavegraph.capture.executor import Executor, StepOutput, Ticket
from wavegraph.engine.fence import ADMISSION, LOGPROBS, TEXT
from wavegraph.engine.handover import RequestState
from wavegraph.engine.histograms import LatencyHistograms
from wavegraph.engine.inputs import checked_ids, encode_prompt
from wavegraph.engine.interrupts import interrupts_held
from wavegraph.engine.live import LiveRequest, token_logprob
from wavegraph.engine.sizes import Sizes
from wavegraph.engine.stats import EngineStats
from wavegraph.engine.trace import StepObserver, TraceWriter
from wavegraph.errors import CaptureError, ConfigError, EngineError, RequestError, RequestFailedError
from wavegraph.model.sampling import MAX_STOP_IDS
from wavegraph.model.weights import Model, check_new_weights
from wavegraph.outputs import RequestOutput
from wavegraph.sampling import SamplingParams
from wavegraph.scheduler.checker import Checker
from wavegraph.scheduler.plan import CodaAction, RequestSpec, RequestUpdate, StepPlan, StepResult
from wavegraph.scheduler.scheduler import Scheduler
from wavegraph.text.stream import OutputText
from wavegraph.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
"""Called with (done, total) as long work goes on."""

HANDOVER_KEY = 0
"""Key of pages that are being exported; requests' own keys start at 1."""


@dataclass(slots=True)
class _Flight:
    """A submitted step. Times are when its planning began and when it was submitted."""

    plan: StepPlan
    ticket: Ticket
    planned: float
    submitted: float


class Engine:
    """Runs requests of one model. See `wavegraph.llm.LLM` for the way to make one from a checkpoint.

    ``sizes`` are the limits derived from config and model. Recording the programs happens here; ``progress`` is
    told about it. ``tokenizer`` None means that prompts are token ids and outputs have no text. ``run_ahead`` 1 takes
    each step's result before the next is planned; more plan ahead while a worker thread runs the steps. ``trace``
    gets every step; so does whoever else is put among the ``observers``. ``cost`` is what steps take; None:
    `CostModel.assumed`.
    """

    def __init__(
        self,
        model: Model,
        sizes: Sizes,
        *,
        backend: Backend,
        tokenizer: Tokenizer | None = None,
        check: bool = False,
        run_ahead: int = 1,
        trace: TraceWriter | None = None,
        cost: CostModel | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.model = model
        self.sizes = sizes
        self.tokenizer = tokenizer
        self.scheduler = Scheduler(sizes.scheduler, sizes.ladder, sizes.coda_ladder, cost)
        self.executor = Executor(
            model,
            sizes.limits,
            sizes.ladder,
            sizes.coda_ladder,
            backend,
            max_in_flight=run_ahead,
            asynchronous=run_ahead > 1,
            check=check,
        )
        self._checker = Checker(sizes.scheduler, sizes.ladder, sizes.coda_ladder, cost) if check else None
        self._run_ahead = run_ahead
        self._trace = trace
        self.observers: list[StepObserver] = [] if trace is None else [trace]
        self._records: dict[str, LiveRequest] = {}
        self._flights: deque[_Flight] = deque()
        self._last_end = 0.0
        self._undelivered: list[RequestOutput] = []  # of a step that an interrupt followed
        self._finished: Counter[str] = Counter()
        self._failures: Counter[str] = Counter()
        self._latencies = LatencyHistograms()
        self._prompt_tokens = 0
        self._output_tokens = 0
        self._broken: str | None = None
        self._closed = False
        self.executor.capture(progress)

    # -- requests ------------------------------------------------------------------------------------------

    def add_request(
        self, request_id: str, prompt: str | Sequence[int], params: SamplingParams, *, priority: int = 0
    ) -> list[str]:
        """Queue a request; returns the ids of its ``n`` outputs: itself, or ``id#0 .. id#n-1``.

        ``prompt`` is text, which needs a tokenizer, or token ids. A lower ``priority`` is served earlier if the engine
        admits by priority. An id can be used again once its request ended. Raises `RequestError`, changing nothing,
        if it cannot be served, and `RequestFailedError`, likewise, if to find that out failed.
        """
        self._require_working()
        arrival = perf_counter()
        if not isinstance(request_id, str):
            raise RequestError(f"request_id must be a string, got {request_id!r}")
        if type(priority) is not int:
            raise RequestError(f"priority must be an integer, got {priority!r}")
        if not isinstance(params, SamplingParams):
            raise RequestError(f"params must be SamplingParams, got {params!r}")
        seed = params.seed if params.seed is not None else secrets.randbits(63)
        names = [request_id] if params.n == 1 else [f"{request_id}#{index}" for index in range(params.n)]
        with self._failures_counted(request_id), ADMISSION:
            ids = encode_prompt(prompt, self.tokenizer, self.model.config.vocab_size)
            specs = [self._spec(name, ids, params, priority, index, seed) for index, name in enumerate(names)]
            texts = [self._text(params, ids) for _ in names]
        added: list[str] = []
        try:
            for index, (spec, text) in enumerate(zip(specs, texts, strict=True)):
                self.scheduler.add(spec)
                added.append(spec.request_id)
                self._register(spec, LiveRequest(spec, params, _text_of(prompt), text, arrival, index, seed))
        except RequestError:
            for name in added:
                self.abort(name)
            raise
        return names

    def abort(self, request_id: str) -> bool:
        """End a request at once and free what it holds, with no further output; False if it is not live."""
        self._undelivered = [output for output in self._undelivered if output.request_id != request_id]
        live = not self._closed and self.scheduler.cancel(request_id)
        if live:
            self._end(request_id, "abort", perf_counter())
        return live

    @contextmanager
    def _failures_counted(self, request_id: str) -> Iterator[None]:
        """For a request that is not in yet."""
        try:
            yield
        except RequestFailedError as error:
            self._note_failure(request_id, error)
            raise

    def _note_failure(self, request_id: str, error: RequestFailedError) -> None:
        self._failures[error.cause] += 1
        logger.error("request %r: %s", request_id, error, exc_info=error)

    def _spec(
        self, name: str, ids: list[int], params: SamplingParams, priority: int, index: int, seed: int
    ) -> RequestSpec:
        config = self.model.config
        stop = frozenset(checked_ids("stop_token_ids", params.stop_token_ids, config.vocab_size))
        checked_ids("logit_bias", list(params.logit_bias), config.vocab_size)
        if params.stop and self.tokenizer is None:
            raise RequestError("stop: strings need a tokenizer, and the checkpoint has none; give stop_token_ids")
        if not params.ignore_eos:
            stop |= frozenset(config.eos_token_ids)
        if params.min_tokens and len(stop) > MAX_STOP_IDS:
            raise RequestError(
                f"min_tokens: can hold back at most {MAX_STOP_IDS} ids, but {len(stop)} end this request; give fewer"
            )
        return RequestSpec(
            name,
            ids,
            params.max_tokens,
            stop,
            priority=priority,
            exit_rule=params.exit_rule(config.total_ut_steps),
            score_prompt=params.prompt_logprobs is not None,
            needs_history=params.uses_penalties,
            coda_features=params.coda_features,
            device_params=params.device_params(len(ids), stop, index, seed),
        )

    def _text(self, params: SamplingParams, prompt: Sequence[int]) -> OutputText | None:
        if self.tokenizer is None:
            return None
        stream = self.tokenizer.stream(params.skip_special_tokens, prompt)
        return OutputText(stream, params.stop, params.include_stop_str_in_output, params.min_tokens)

    def _register(self, spec: RequestSpec, record: LiveRequest) -> None:
        self._records[spec.request_id] = record
        self._prompt_tokens += len(spec.prompt_token_ids)
        if self._checker is not None:
            self._checker.add(spec)

    # -- one step ------------------------------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """Submit what may be planned and take the oldest step's result; returns the output of requests with news.

        A step that cannot be launched ends its own requests with ``finish_reason="error"``, and so does whatever
        goes wrong in work that is for one request alone; the others go on.
        A Ctrl-C is raised when the step is complete; its outputs then come with those of the next one. Raises
        `EngineError` if the engine cannot go on, then and at every later call.
        """
        self._require_working()
        with self._whole_steps():
            self._undelivered += self._advance()
        outputs, self._undelivered = self._undelivered, []
        return outputs

    @contextmanager
    def _whole_steps(self) -> Iterator[None]:
        """No Ctrl-C between a step's parts; anything unforeseen stops the engine."""
        with interrupts_held():
            self._broken = "its last step did not come to an end"  # stays if the block raises
            yield
            self._broken = None

    def _advance(self) -> list[RequestOutput]:
        outputs: list[RequestOutput] = []
        while len(self._flights) < self._run_ahead:
            if self._flights and self.scheduler.waits_for_gates:
                break  # running ahead would split the batch in two, each half waiting for the other's step
            planned = perf_counter()
            plan = self.scheduler.plan()
            if plan is None:
                break
            outputs += self._submit(plan, planned)
        if self._flights:
            flight = self._flights.popleft()
            outputs += self._apply(flight, self.executor.poll(flight.ticket))
        elif not outputs and self.scheduler.has_unfinished:
            raise EngineError(
                f"{self.scheduler.num_running} running and {self.scheduler.num_waiting} waiting requests, "
                "but no row is ready: the scheduler has lost track of them"
            )
        return outputs

    def _submit(self, plan: StepPlan, planned: float) -> list[RequestOutput]:
        if self._checker is not None:
            self._checker.check(plan)
        try:
            ticket = self.executor.submit(plan)
        except CaptureError as error:  # nothing was launched
            return self._fail_step(plan, str(error))
        self._flights.append(_Flight(plan, ticket, planned, perf_counter()))
        for request_id, _ in plan.param_owner:
            self._records[request_id].mark_scheduled(planned, self._latencies)
        return []

    def _apply(self, flight: _Flight, output: StepOutput) -> list[RequestOutput]:
        now, plan = perf_counter(), flight.plan
        if self._checker is not None:
            self._checker.complete(plan, output.tokens)
        outputs = self._note_scores(plan, output) if output.logprobs is not None else []
        updates = self.scheduler.apply(plan, StepResult(plan.step_id, output.tokens))
        if self.observers:
            began = max(flight.submitted, self._last_end)
            times = (flight.planned, flight.submitted, began, now)
            for observer in self.observers:
                observer.step(plan, times, self.scheduler.num_waiting, self.scheduler.residency.pages.num_free)
        self._last_end = now
        outputs += [self._report(update, output, now) for update in updates if update.request_id in self._records]
        return outputs

    def _report(self, update: RequestUpdate, output: StepOutput, now: float) -> RequestOutput:
        record = self._records[update.request_id]
        if self._checker is not None:
            self._checker.accept(update)
        record.mark_token(now, self._latencies)
        record.cached_tokens = update.cached_tokens
        self._output_tokens += 1
        try:
            reason = _take(record, update, output)
        except RequestFailedError as error:
            return self._fail(record, error, now)
        if reason is not None:
            if update.finish_reason is None:
                self.scheduler.cancel(update.request_id)
            self._end(update.request_id, reason, now)
        return record.output(reason)

    def _note_scores(self, plan: StepPlan, output: StepOutput) -> list[RequestOutput]:
        """Prompt log-probabilities: row for position p is about the prompt's token p + 1. Returns what failed."""
        assert output.logprobs is not None
        failed = []
        live = self.scheduler.residency.live  # an id may have a new owner since the step was planned
        for row, (task, action) in enumerate(zip(plan.coda_tasks, plan.coda_action, strict=True)):
            if action == CodaAction.SCORE and task.generation in live:
                record = self._records[task.request_id]
                assert record.params.prompt_logprobs is not None
                position = task.token_start + 1
                token = record.spec.prompt_token_ids[position]
                try:
                    with LOGPROBS:
                        record.prompt_logprobs[position] = token_logprob(
                            output.logprobs, row, token, record.params.prompt_logprobs
                        )
                except RequestFailedError as error:
                    failed.append(self._fail(record, error, perf_counter()))
        return failed

    def _fail_step(self, plan: StepPlan, reason: str) -> list[RequestOutput]:
        """End the requests of a step that could not be launched."""
        now = perf_counter()
        if self._checker is not None:
            self._checker.retract(plan)
        error = RequestFailedError(reason, "step")
        return [self._fail(self._records[request_id], error, now) for request_id in self.scheduler.fail(plan)]

    def _fail(self, record: LiveRequest, error: RequestFailedError, now: float) -> RequestOutput:
        """End a request, and it alone, with ``finish_reason`` "error": its pages come back. Returns its last output."""
        request_id = record.spec.request_id
        self._note_failure(request_id, error)
        self.scheduler.cancel(request_id)
        self._end(request_id, "error", now)
        return record.output("error", f"request {request_id!r}: {error}")

    def _end(self, request_id: str, reason: str, now: float) -> None:
        """Close the books of a request."""
        record = self._records.pop(request_id)
        record.finish(now)
        self._finished[reason] += 1
        if self._trace is not None:
            tokens = len(record.spec.prompt_token_ids), len(record.token_ids)
            self._trace.request(request_id, record.metrics.arrival, now, *tokens, reason)
        if reason in ("stop", "length"):
            self._latencies.finished(record.metrics)
        if self._checker is not None:
            self._checker.end(request_id)

    def _drain(self) -> None:
        """Take the results of all steps in flight; their outputs come with the next `step`."""
        with self._whole_steps():
            while self._flights:
                flight = self._flights.popleft()
                self._undelivered += self._apply(flight, self.executor.poll(flight.ticket))

    @property
    def has_unfinished(self) -> bool:
        """Whether any request waits or runs, or has news that `step` has not returned yet."""
        return bool(self._undelivered) or self.scheduler.has_unfinished

    # -- mid-life ------------------------------------------------------------------------------------------

    @property
    def compatibility(self) -> str:
        """What an exported request needs of the engine that imports it. The weights are not looked at."""
        return self.sizes.compatibility

    def export_request(self, request_id: str) -> RequestState:
        """Take a live request out of this engine, wherever it is in its life. `import_request` goes on with it.

        Raises `RequestError` if it is not live (any more).
        """
        self._require_working()
        self._drain()
        snapshot, key = self.scheduler.export_request(request_id)
        if key is None:
            key = HANDOVER_KEY
            self.executor.swap_out(key, snapshot.pages)
        record = self._records[request_id]
        state = RequestState(
            self.compatibility,
            snapshot,
            record.params,
            record.prompt,
            record.index,
            record.seed,
            record.logprobs,
            record.prompt_logprobs,
            self.executor.take_swapped(key),
        )
        self.abort(request_id)
        return state

    def import_request(self, state: RequestState) -> None:
        """Go on with a request that another engine exported. Raises `RequestError` if it does not fit this one."""
        self._require_working()
        if state.compatibility != self.compatibility:
            raise RequestError(
                f"request {state.snapshot.spec.request_id!r}: was exported by an engine of another model, dtype, page "
                f"size or KV layout ({state.compatibility}, here {self.compatibility}); import it into an equal one"
            )
        spec = state.snapshot.spec
        if any(len(tensor) != len(state.snapshot.pages) for tensor in state.pages.values()):
            raise RequestError(
                f"request {spec.request_id!r}: brings tensors that are not of its {len(state.snapshot.pages)} pages"
            )
        outputs = state.snapshot.tokens[len(spec.prompt_token_ids) :]
        with self._failures_counted(spec.request_id), ADMISSION:
            text = self._text(state.params, spec.prompt_token_ids)
            record = LiveRequest(spec, state.params, state.prompt, text, perf_counter(), state.index, state.seed)
            for token, depth in zip(outputs, state.snapshot.exits, strict=True):
                record.append(token, depth, None, ended_by_id=False)
        record.logprobs, record.prompt_logprobs = list(state.logprobs), list(state.prompt_logprobs)
        key = self.scheduler.import_request(state.snapshot)
        if state.snapshot.pages:
            try:
                self.executor.put_swapped(key, state.pages)
            except CaptureError as error:
                self.scheduler.cancel(spec.request_id)
                raise RequestError(f"request {spec.request_id!r}: {error}") from error
        self._records[spec.request_id] = record
        if self._checker is not None:
            self._checker.adopt(state.snapshot, key)

    def preempt(self, request_id: str) -> bool:
        """Send a running request back to the queue, as pressure would; False if it is not running."""
        return self.scheduler.preempt(request_id)

    def update_weights(
        self, tensors: Mapping[str, Tensor], *, live: Literal["refuse", "finish", "abort"] = "refuse"
    ) -> None:
        """Replace weights in place: no new capture; cached prefixes are dropped.

        ``tensors`` has all the checkpoint's names and shapes. ``live`` says what to do with requests that are
        not finished: refuse the update, finish them first (their outputs come with the next `step`), or abort them.
        Raises `EngineError` if refused, `CheckpointError` for a wrong name or shape; nothing is changed then.
        """
        self._require_working()
        if live not in ("refuse", "finish", "abort"):
            raise ConfigError(f"live must be 'refuse', 'finish' or 'abort', got {live!r}")
        check_new_weights(self.model.config, tensors)  # before any request is touched for their sake
        if live == "refuse" and self.scheduler.has_unfinished:
            raise EngineError(
                f"update_weights: {len(self._records)} requests are not finished; pass live='finish' or live='abort'"
            )
        if live == "abort":
            for request_id in list(self._records):
                self.abort(request_id)
        with self._whole_steps():
            while self.scheduler.has_unfinished:
                self._undelivered += self._advance()
        self._drain()
        self.executor.update_weights(tensors)
        self.scheduler.forget_prefixes()
        if self._checker is not None:
            self._checker.forget_prefixes()

    # -- sight ---------------------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """What the engine has done and how full it is."""
        residency = self.scheduler.residency
        return EngineStats(
            running=self.scheduler.num_running,
            waiting=self.scheduler.num_waiting,
            pages=residency.pages.num_pages,
            free_pages=residency.pages.num_free,
            cached_pages=residency.pages.num_cached,
            swapped_pages=residency.swapped_pages,
            preemptions=residency.preemptions,
            prefix_queries=residency.prefix_queries,
            prefix_hits=residency.prefix_hits,
            prompt_tokens=self._prompt_tokens,
            output_tokens=self._output_tokens,
            finished=dict(self._finished),
            failures=dict(self._failures),
            latencies=self._latencies.copy(),
            scheduler=deepcopy(self.scheduler.stats),
            executor=deepcopy(self.executor.stats),
        )

    def close(self) -> None:
        """Free pools and recorded programs. Live requests get no more output. May be called twice."""
        if not self._closed:
            self._closed = True
            self._records.clear()
            self.executor.close()
            for observer in self.observers:
                observer.close()

    def _require_working(self) -> None:
        if self._closed:
            raise EngineError("the engine was closed; make a new one")
        if self._broken is not None:
            raise EngineError(f"the engine cannot go on, because {self._broken}; make a new one")


def _take(record: LiveRequest, update: RequestUpdate, output: StepOutput) -> str | None:
    """A request's own part of a step: its token becomes text. Returns why it ended, None if it goes on.

    Raises `RequestFailedError`.
    """
    logprob = None
    if record.params.logprobs is not None and output.logprobs is not None:
        with LOGPROBS:
            logprob = token_logprob(output.logprobs, update.coda_row, update.token_id, record.params.logprobs)
    with TEXT:
        record.append(update.token_id, update.exit_depth, logprob, update.finish_reason == "stop")
        if update.finish_reason is not None or record.stop_reason is not None:
            record.complete()
    return "stop" if record.stop_reason is not None else update.finish_reason


def _text_of(prompt: str | Sequence[int]) -> str | None:
    return prompt if isinstance(prompt, str) else None
