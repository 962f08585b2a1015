"""The real scheduler and packing with no model: what a workload's steps look like, and what they cost the host."""

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np

from wavegraph.buckets.ladder import Ladder
from wavegraph.capture.metadata import StepLayout
from wavegraph.scheduler.checker import Checker
from wavegraph.scheduler.plan import RequestSpec, StepPlan, StepResult
from wavegraph.scheduler.scheduler import Scheduler, SchedulerConfig


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """Totals of a simulation. ``rows_per_step`` and ``spans_per_step`` are means, ``host_us_per_step`` the
    median microseconds that the host spends to plan and pack one step; ``host_us_full_step`` the same over the
    steps that hold the most spans seen.
    """

    steps: int
    rows: int
    rows_per_step: float
    spans_per_step: float
    max_spans: int
    padding_rows: int
    coda_steps: int
    host_us_per_step: float
    host_us_full_step: float

    def as_dict(self) -> dict[str, float]:
        """Field names to values, as `wavegraph simulate --json` writes them."""
        return asdict(self)


def simulate(
    prompt_lens: list[int],
    config: SchedulerConfig,
    *,
    max_tokens: int = 1,
    ladder: Ladder | None = None,
    check: bool = False,
    max_steps: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> SimulationResult:
    """Run requests of the given prompt lengths, all present at the start, to their end or for ``max_steps``.

    Every step's sampled tokens are 0. ``check`` verifies each plan with the independent `Checker` (outside the
    timed part). ``progress`` is told ``(rows done, rows in all)`` after each step. Raises `RequestError` for a
    request that could never be served.
    """
    scheduler = Scheduler(config, ladder)
    checker = Checker(config, ladder) if check else None
    for index, length in enumerate(prompt_lens):
        spec = RequestSpec(str(index), [1] * length, max_tokens)
        scheduler.add(spec)
        if checker:
            checker.add(spec)
    layout = StepLayout(
        max_rows=ladder.max if ladder else config.max_num_batched_tokens,
        max_coda_rows=config.max_num_seqs,
        max_spans=config.max_num_seqs * config.depths,
        scratch_slot=config.max_num_seqs,
        scratch_page=config.num_pages,
    )
    buffer = np.empty(layout.size, dtype=np.int32)
    seconds: list[float] = []
    spans: list[int] = []
    total = config.depths * sum(length + max_tokens - 1 for length in prompt_lens)
    while max_steps is None or len(seconds) < max_steps:
        started = time.perf_counter()
        plan = scheduler.plan()
        if plan is None:
            break
        parts = layout.parts(plan)
        for part in range(parts):
            layout.pack(plan, buffer, part, parts)
        seconds.append(time.perf_counter() - started)
        spans.append(len(plan.tasks))
        if checker:
            checker.check(plan)
        _finish(scheduler, checker, plan)
        if progress is not None:
            progress(scheduler.stats.rows, total)
    return _summary(scheduler, seconds, spans)


def _finish(scheduler: Scheduler, checker: Checker | None, plan: StepPlan) -> None:
    tokens = [0] * len(plan.coda_tasks)
    if checker:
        checker.complete(plan, tokens)
    updates = scheduler.apply(plan, StepResult(plan.step_id, tokens))
    if checker:
        for update in updates:
            checker.accept(update)
            if update.finish_reason is not None:
                checker.end(update.request_id)


def _summary(scheduler: Scheduler, seconds: list[float], spans: list[int]) -> SimulationResult:
    stats = scheduler.stats
    steps = max(1, stats.steps)
    most = max(spans, default=0)
    full = [s for s, n in zip(seconds, spans, strict=True) if n == most]
    return SimulationResult(
        steps=stats.steps,
        rows=stats.rows,
        rows_per_step=round(stats.rows / steps, 2),
        spans_per_step=round(stats.spans / steps, 2),
        max_spans=most,
        padding_rows=stats.padding_rows,
        coda_steps=stats.coda_steps,
        host_us_per_step=round(statistics.median(seconds or [0.0]) * 1e6, 1),
        host_us_full_step=round(statistics.median(full or [0.0]) * 1e6, 1),
    )
