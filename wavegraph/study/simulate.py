"""The real scheduler and packing with no model, on virtual time.

What a workload's steps look like, what they cost the host (measured), and when tokens would come (predicted by a
`CostModel`). Host and device have a clock each, as in the engine: a step is planned and submitted by the host, runs on
the device after the one before it, and its result is taken when up to ``run_ahead`` steps are in flight.
"""

import statistics
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np

from wavegraph.buckets.cost import CostModel
from wavegraph.buckets.ladder import Ladder
from wavegraph.capture.metadata import StepLayout
from wavegraph.errors import EngineError
from wavegraph.scheduler.checker import Checker
from wavegraph.scheduler.config import SchedulerConfig
from wavegraph.scheduler.packing import attended
from wavegraph.scheduler.plan import RequestSpec, StepPlan, StepResult
from wavegraph.scheduler.scheduler import Scheduler
from wavegraph.study.latency import Latencies, Timeline
from wavegraph.study.workload import Arrival, Workload


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """Totals of a simulation.

    ``rows_per_step`` and ``spans_per_step`` are means, ``host_us_per_step`` the median microseconds that the host
    spends to plan and pack one step; ``host_us_full_step`` the same over the steps that hold the most spans seen.
    ``bucket_hits`` counts replays of CORE by bucket; ``padding`` is the share of replayed rows that carried no work.

    Times are virtual, in ``unit``: ``s``, or ``cost`` if the cost model was assumed, where they can only be compared
    with each other. ``prompt_throughput`` and ``output_throughput`` are tokens per unit over ``duration``; a prompt
    counts once its first token was seen. ``latencies`` are of the requests that got a token.
    """

    steps: int
    rows: int
    rows_per_step: float
    spans_per_step: float
    max_spans: int
    padding_rows: int
    padding: float
    bucket_hits: dict[int, int]
    coda_steps: int
    host_us_per_step: float
    host_us_full_step: float
    unit: str
    duration: float
    finished: int
    prompt_tokens: int
    output_tokens: int
    prompt_throughput: float
    output_throughput: float
    latencies: Latencies

    def as_dict(self) -> dict[str, object]:
        """JSON types, as `wavegraph simulate --json` writes them; latencies stand beside the totals."""
        values = asdict(self) | {"bucket_hits": {str(bucket): hits for bucket, hits in self.bucket_hits.items()}}
        latencies = values.pop("latencies")
        return {**values, **latencies}


def simulate(
    workload: Workload,
    config: SchedulerConfig,
    *,
    ladder: Ladder | None = None,
    coda_ladder: Ladder | None = None,
    cost: CostModel | None = None,
    prices: CostModel | None = None,
    run_ahead: int = 1,
    check: bool = False,
    max_steps: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    on_plan: Callable[[StepPlan], None] | None = None,
) -> SimulationResult:
    """Run a workload to its end, or for ``max_steps``.

    Every step's sampled tokens are 0, and no token ends its request early. Without a ``ladder`` a step's bucket is its
    row count; without a ``cost``, `CostModel.assumed`. ``prices`` is what steps take, if that is not the ``cost`` that
    the scheduler decides by. ``run_ahead`` is the engine's: 1 takes each step's result before the next is planned.
    ``check`` verifies each plan with the independent `Checker` (outside the timed part). ``progress`` is told
    ``(rows done, rows in all)`` after each step, ``on_plan`` is given each plan. Raises `RequestError` for a request
    that could never be served.
    """
    run = _Simulation(workload, config, ladder, coda_ladder, cost, prices, run_ahead, check, on_plan)
    total = config.depths * sum(each.prompt_tokens + each.output_tokens - 1 for each in workload.requests)
    while run.advance(max_steps):
        if progress is not None:
            progress(run.rows, total)
    return run.result()


def attended_positions(plan: StepPlan) -> int:
    """Pairs of a row and a position that it attends, of a whole step."""
    return sum(map(attended, plan.span_start, plan.span_count))


@dataclass(slots=True)
class _Flight:
    """A submitted step, and when the device is done with it."""

    plan: StepPlan
    ended: float


class _Simulation:
    """The state of a run. ``_host`` and ``_device`` are the times until which either is busy; ``rows`` are done."""

    def __init__(
        self,
        workload: Workload,
        config: SchedulerConfig,
        ladder: Ladder | None,
        coda_ladder: Ladder | None,
        cost: CostModel | None,
        prices: CostModel | None,
        run_ahead: int,
        check: bool,
        on_plan: Callable[[StepPlan], None] | None,
    ) -> None:
        self._on_plan = on_plan
        self.scheduler = Scheduler(config, ladder, coda_ladder, cost)
        self._checker = Checker(config, ladder, coda_ladder, self.scheduler.cost) if check else None
        self._prices = prices if prices is not None else self.scheduler.cost
        self._run_ahead = run_ahead
        self._coming = deque(enumerate(workload.requests))
        self._requests: dict[str, tuple[Arrival, Timeline]] = {}
        self._flights: deque[_Flight] = deque()
        self._host = self._device = 0.0
        self._finished = 0
        self.rows = 0
        self._layout = StepLayout(
            max_rows=ladder.max if ladder else config.max_num_batched_tokens,
            max_coda_rows=config.max_num_seqs,
            max_spans=config.max_num_seqs * config.depths,
            scratch_slot=config.max_num_seqs,
            scratch_page=config.num_pages,
        )
        self._buffer = np.empty(self._layout.size, dtype=np.int32)
        self._seconds: list[float] = []
        self._spans: list[int] = []
        self._hits: Counter[int] = Counter()

    def advance(self, max_steps: int | None) -> bool:
        """What `Engine.step` does: plan ahead, then take the oldest result. False if nothing is left to do."""
        self._receive()
        while len(self._flights) < self._run_ahead and len(self._spans) != max_steps and self._submit():
            pass
        if self._flights:
            self._collect(self._flights.popleft())
            return True
        if len(self._spans) == max_steps:
            return False
        if self.scheduler.has_unfinished:
            raise EngineError(f"no row is ready, but {len(self._requests) - self._finished} requests have not ended")
        if self._coming:
            self._host = self._coming[0][1].arrival
        return bool(self._coming)

    def _receive(self) -> None:
        while self._coming and self._coming[0][1].arrival <= self._host:
            index, arrival = self._coming.popleft()
            spec = RequestSpec(str(index), [1] * arrival.prompt_tokens, arrival.output_tokens)
            self.scheduler.add(spec)
            self._requests[spec.request_id] = arrival, Timeline(arrival.arrival)
            if self._checker:
                self._checker.add(spec)

    def _submit(self) -> bool:
        started = time.perf_counter()
        plan = self.scheduler.plan()
        if plan is None:
            return False
        parts = self._layout.parts(plan)
        for part in range(parts):
            self._layout.pack(plan, self._buffer, part, parts)
        self._seconds.append(time.perf_counter() - started)
        self._spans.append(len(plan.tasks))
        if plan.bucket:
            self._hits[plan.bucket] += 1
        if self._checker:
            self._checker.check(plan)
        if self._on_plan:
            self._on_plan(plan)
        prices = self._prices
        self._host += prices.host_seconds
        replays = prices.step_seconds(plan.bucket, attended_positions(plan), plan.coda_bucket) - prices.host_seconds
        self._device = max(self._host, self._device) + replays
        self._flights.append(_Flight(plan, self._device))
        return True

    def _collect(self, flight: _Flight) -> None:
        plan, tokens = flight.plan, [0] * len(flight.plan.coda_tasks)
        self._host = max(self._host, flight.ended)
        self.rows += plan.rows
        if self._checker:
            self._checker.complete(plan, tokens)
        for update in self.scheduler.apply(plan, StepResult(plan.step_id, tokens)):
            self._requests[update.request_id][1].tokens.append(self._host)
            self._finished += update.finish_reason is not None
            if self._checker:
                self._checker.accept(update)
                if update.finish_reason is not None:
                    self._checker.end(update.request_id)

    def result(self) -> SimulationResult:
        """What has come of it so far."""
        stats, steps = self.scheduler.stats, max(1, self.scheduler.stats.steps)
        most = max(self._spans, default=0)
        full = [s for s, n in zip(self._seconds, self._spans, strict=True) if n == most]
        timelines = [timeline for _, timeline in self._requests.values()]
        prompt = sum(arrival.prompt_tokens for arrival, timeline in self._requests.values() if timeline.tokens)
        output = sum(len(timeline.tokens) for timeline in timelines)
        return SimulationResult(
            steps=stats.steps,
            rows=stats.rows,
            rows_per_step=round(stats.rows / steps, 2),
            spans_per_step=round(stats.spans / steps, 2),
            max_spans=most,
            padding_rows=stats.padding_rows,
            padding=round(stats.padding_rows / max(1, stats.rows + stats.padding_rows), 4),
            bucket_hits=dict(sorted(self._hits.items())),
            coda_steps=stats.coda_steps,
            host_us_per_step=round(statistics.median(self._seconds or [0.0]) * 1e6, 1),
            host_us_full_step=round(statistics.median(full or [0.0]) * 1e6, 1),
            unit="s" if self._prices.measured else "cost",
            duration=self._host,
            finished=self._finished,
            prompt_tokens=prompt,
            output_tokens=output,
            prompt_throughput=prompt / self._host if self._host else 0.0,
            output_throughput=output / self._host if self._host else 0.0,
            latencies=Latencies.of(timelines),
        )
