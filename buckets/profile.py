"""Measures what candidate buckets cost, by driving callables; it knows no backend.

Every point, a bucket at a context, is visited in several rounds, in another order each time, so that a machine that is
slower for a while slows no bucket alone. What was measured is in the file at once (`wavegraph.buckets.samples`).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from random import Random
from statistics import median
from time import perf_counter
from typing import Protocol

from wavegraph.buckets.cost import CostModel
from wavegraph.buckets.fit import BucketMeasure, fit_cost
from wavegraph.buckets.samples import Captured, Point, Samples
from wavegraph.errors import ConfigError

ROUNDS = 3
RUNS = 8
"""Most replays timed in a visit, after one that does not count."""

VISIT_SECONDS = 0.25
"""No further replay is begun in a visit after this time."""

Progress = Callable[[int, int], None]
"""Called with the visits done and in all."""


class Probe(Protocol):
    """Recorded programs that can be replayed at will."""

    def captured(self) -> Iterable[Captured]:
        """What each recording took, of every program and bucket."""

    def host_seconds(self) -> list[float]:
        """Seconds that the host took for each of some steps, besides their replays."""

    def rates(self) -> dict[str, float]:
        """What the machine can do, by name: of the same minutes, to compare replays with."""

    def prepare(self, point: Point) -> int:
        """Have replays do the work of a point; returns the positions that all its rows together attend."""

    def replay(self, point: Point) -> None:
        """Replay once, to its end."""


@dataclass(frozen=True, slots=True)
class Profile:
    """Measured buckets by ascending rows, the host's median seconds of a step, and `Probe.rates`.

    ``source`` says in words where they are from.
    """

    core: tuple[BucketMeasure, ...]
    coda: tuple[BucketMeasure, ...]
    host_seconds: float
    rates: dict[str, float]
    source: str

    def cost(self) -> CostModel:
        """The cost model fitted to it. Raises `ConfigError` if nothing was measured."""
        return fit_cost(self.core, self.coda, host_seconds=self.host_seconds, source=self.source)


def candidate_rows(max_rows: int) -> list[int]:
    """Row counts to measure up to ``max_rows`` where none are named: steps of an eighth of an octave from 16 on.

    Up to 16 every other one: costs between those measured are interpolated.
    """
    if max_rows < 1:
        raise ConfigError(f"candidates: the largest batch must hold at least 1 row, got {max_rows}")
    sizes = {1, 2, max_rows, *range(4, min(max_rows, 16) + 1, 2)}
    step, size = 2, 16
    while size < max_rows:
        sizes.add(size)
        size += step
        if size % (step * 16) == 0:
            step *= 2
    return sorted(size for size in sizes if size <= max_rows)


def points_of(core: Sequence[int], coda: Sequence[int], contexts: Sequence[int]) -> list[Point]:
    """Each core bucket at each context, each coda bucket once. Raises `ConfigError` for one that is not positive."""
    for name, values in (("candidates", [*core, *coda]), ("contexts", contexts)):
        if not values or min(values) < 1:
            raise ConfigError(f"{name}: must be at least one, each of at least 1, got {list(values)}")
    points = [Point("core", rows, context) for rows in core for context in contexts]
    return points + [Point("coda", rows, 0) for rows in coda]


def profile(
    connect: Callable[[], Probe],
    points: Sequence[Point],
    samples: Samples,
    *,
    source: str,
    progress: Progress | None = None,
) -> Profile:
    """Measure all ``points`` that ``samples`` lacks; ``connect`` is called if there are any.

    ``source`` says where the costs are from, in words. A `KeyboardInterrupt` passes through; a later call goes on.
    """
    visits = [(number, point) for number in range(ROUNDS) for point in _shuffled(points, number)]
    missing = [(number, point) for number, point in visits if not samples.has(point, number)]
    if missing or not samples.host_seconds or not samples.rates:
        probe = connect()
        for captured in probe.captured():
            samples.add_captured(captured)
        if not samples.host_seconds:
            samples.add_host(probe.host_seconds())
        if not samples.rates:
            samples.add_rates(probe.rates())
        for done, (number, point) in enumerate(missing, len(visits) - len(missing) + 1):
            positions = probe.prepare(point)
            samples.add(point, number, positions, _timed(probe, point))
            if progress is not None:
                progress(done, len(visits))
    core, coda = (tuple(samples.measures(program)) for program in ("core", "coda"))
    return Profile(core, coda, median(samples.host_seconds), samples.rates, source)


def _shuffled(points: Sequence[Point], number: int) -> list[Point]:
    order = list(points)
    Random(number).shuffle(order)
    return order


def _timed(probe: Probe, point: Point) -> list[float]:
    probe.replay(point)
    seconds: list[float] = []
    while len(seconds) < RUNS and sum(seconds) < VISIT_SECONDS:
        started = perf_counter()
        probe.replay(point)
        seconds.append(perf_counter() - started)
    return seconds
