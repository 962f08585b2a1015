"""What the real scheduler plans, as little as the pictures need of it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from wavegraph.buckets.ladder import Ladder
from wavegraph.scheduler.config import SchedulerConfig
from wavegraph.scheduler.plan import RequestSpec, StepResult
from wavegraph.scheduler.scheduler import Scheduler

DEPTHS = 4
BUCKET = 16
CHUNK = 2


@dataclass(frozen=True, slots=True)
class Span:
    """Positions ``start .. start + count`` of a request at one depth."""

    request: str
    depth: int
    start: int
    count: int

    @property
    def look(self) -> str:
        """The palette's class for it."""
        return f"{self.request.lower()}{self.depth}"


@dataclass(frozen=True, slots=True)
class Step:
    """One replay: its spans in the order of their rows, and the requests that draw a token after it."""

    spans: tuple[Span, ...]
    tokens: tuple[str, ...]

    @property
    def rows(self) -> int:
        """Rows that carry work."""
        return sum(span.count for span in self.spans)


def steps(arrivals: Mapping[int, Sequence[tuple[str, int, int]]], *, wavefront: bool = True) -> Iterator[Step]:
    """Steps of `DEPTHS` depths, chunks of `CHUNK` rows and one bucket of `BUCKET`, until nothing is left to do.

    ``arrivals`` gives, by step, who comes: a name, the tokens of its prompt, the tokens that it gets.
    """
    config = SchedulerConfig(
        depths=DEPTHS,
        page_size=16,
        num_pages=64,
        max_model_len=64,
        max_num_seqs=8,
        max_num_batched_tokens=BUCKET,
        prefill_chunk_size=CHUNK,
        packing="fill",
        wavefront=wavefront,
    )
    scheduler = Scheduler(config, Ladder([BUCKET]))
    for name, prompt, output in arrivals.get(0, ()):
        scheduler.add(RequestSpec(name, [0] * prompt, output))
    while (plan := scheduler.plan()) is not None:
        spans = tuple(Span(task.request_id, task.depth, task.token_start, task.token_count) for task in plan.tasks)
        yield Step(spans, tuple(task.request_id for task in plan.coda_tasks))
        scheduler.apply(plan, StepResult(plan.step_id, [0] * len(plan.coda_tasks)))
        for name, prompt, output in arrivals.get(plan.step_id + 1, ()):
            scheduler.add(RequestSpec(name, [0] * prompt, output))
