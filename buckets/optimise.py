"""The ladder that a workload's steps replay fastest, under a budget of graphs, bytes and capture seconds.

A step that wants w rows replays the smallest bucket b >= w, in ``seconds(b)``. Which buckets a ladder has between two
neighbouring wanted row counts therefore matters only through the lowest of them: the others serve no step. So the
choice is which *gaps* ``[w_i, w_i+1)`` get a bucket, and which size in the gap it has. Where cost grows with rows the
best size is w_i itself, but measured cost may fall, so every size of a gap is looked at, and all that no other one
beats in seconds, bytes and capture seconds are kept. `optimise` is exact for every cost.
"""

import heapq
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from wavegraph.buckets.cost import CostModel, ProgramCost
from wavegraph.buckets.ladder import Ladder
from wavegraph.errors import ConfigError

Histogram = Mapping[int, float]
"""Wanted rows of a step to the number of such steps (or their weight)."""

Floats = NDArray[np.float64]

PRICE_STEPS = 32
"""Steps of the search for the prices of budgets."""


@dataclass(frozen=True, slots=True)
class _Options:
    """Buckets that may be chosen, gap by gap, and the ``limits [budgets]`` on what they use in sum.

    Those of gap g are ``first[g] <= option < first[g + 1]``, each with its ``rows``, ``seconds`` and ``used [options,
    budgets]``. ``steps[g]`` is the number of steps that want a row count of the first g gaps. The last gap holds only
    the top bucket.
    """

    steps: Floats
    first: list[int]
    rows: list[int]
    seconds: list[float]
    used: Floats
    limits: Floats

    @property
    def gaps(self) -> int:
        return len(self.first) - 1

    def of(self, gap: int) -> range:
        return range(self.first[gap], self.first[gap + 1])


@dataclass(frozen=True, slots=True)
class _Table:
    """``best[k, g]``: the least seconds (and prices) to serve the first g gaps' steps with k buckets.

    The largest of them is ``option[k, g]``, and the steps of the gaps below ``below[k, g]`` are left to the others.
    """

    best: Floats
    option: NDArray[np.int64]
    below: NDArray[np.int64]

    def sizes(self, options: _Options) -> list[int]:
        """The options of the best ladder, the fewest if several are."""
        gap = options.gaps
        graphs = int(self.best[:, gap].argmin())
        chosen = []
        while gap:
            chosen.append(int(self.option[graphs, gap]))
            gap, graphs = int(self.below[graphs, gap]), graphs - 1
        return chosen


def optimise(
    histogram: Histogram,
    cost: CostModel,
    *,
    max_graphs: int,
    max_bytes: int | None = None,
    max_capture_seconds: float | None = None,
    max_rows: int | None = None,
) -> Ladder:
    """The ladder of at most ``max_graphs`` buckets whose core replays take the fewest predicted seconds.

    It is closed at ``max_rows`` (default: the largest row count wanted). Its recordings keep at most ``max_bytes`` and
    take at most ``max_capture_seconds``. Of equally good ladders, one with the fewest buckets. Takes time in proportion
    to ``max_graphs`` and the square of the distinct row counts; a budget that binds makes it a search. Raises
    `ConfigError` for an empty histogram, rows above ``max_rows``, or budgets that no ladder meets.
    """
    wanted = _checked(histogram, max_graphs, max_rows)
    budgets = {"max_bytes": max_bytes, "max_capture_seconds": max_capture_seconds}
    given = {name: float(value) for name, value in budgets.items() if value is not None}
    _check_budgets(cost.core, max(wanted), given)
    options = _options(wanted, cost.core, given)
    free = _fill_table(options, max_graphs, np.zeros(len(given)))
    chosen = free.sizes(options)
    if not _affordable(options, chosen):
        chosen = _Search(options, max_graphs).run()
    return Ladder(options.rows[option] for option in chosen)


def padding(histogram: Histogram, ladder: Ladder) -> float:
    """Rows that carry no work when every step of ``histogram`` replays its bucket."""
    return sum(steps * (ladder.bucket(rows) - rows) for rows, steps in histogram.items())


def predicted_seconds(histogram: Histogram, ladder: Ladder, cost: CostModel) -> float:
    """Seconds of all steps of ``histogram``, without the term of attended positions, which no ladder changes."""
    return sum(steps * cost.step_seconds(ladder.bucket(rows)) for rows, steps in histogram.items())


def ladder_bytes(ladder: Ladder, cost: CostModel) -> int:
    """Bytes that the recordings of the core keep."""
    return sum(cost.core.bytes(rows) for rows in ladder.sizes)


def ladder_capture_seconds(ladder: Ladder, cost: CostModel) -> float:
    """Seconds to record the core at every bucket."""
    return sum(cost.core.capture(rows) for rows in ladder.sizes)


def _checked(histogram: Histogram, max_graphs: int, max_rows: int | None) -> dict[int, float]:
    """The histogram without empty entries, by ascending rows, ended by the top bucket."""
    if max_graphs < 1:
        raise ConfigError(f"max_graphs: a ladder has at least 1 bucket, got {max_graphs}")
    wanted = {rows: float(steps) for rows, steps in sorted(histogram.items()) if steps}
    if not wanted and max_rows is None:
        raise ConfigError("histogram: holds no step; give a workload that has some, or max_rows")
    top = max(wanted) if max_rows is None else max_rows
    if top < 1 or any(not 1 <= rows <= top for rows in wanted):
        raise ConfigError(f"histogram: wants {min(wanted)} to {max(wanted)} rows, but a step holds 1 to {top}")
    if not all(0 < steps < float("inf") for steps in wanted.values()):
        raise ConfigError("histogram: steps must be positive and finite")
    return wanted if top in wanted else {**wanted, top: 0.0}


def _check_budgets(core: ProgramCost, top: int, budgets: Mapping[str, float]) -> None:
    """Every ladder has the top bucket, and that alone is one: so it decides whether a budget can be met."""
    for name, needed in (("max_bytes", core.bytes(top)), ("max_capture_seconds", core.capture(top))):
        if needed > budgets.get(name, float("inf")):
            raise ConfigError(
                f"{name}: {budgets[name]:g} is less than the top bucket of {top} rows takes, {needed:g}; raise it, or "
                "lower max_rows"
            )


def _options(wanted: Mapping[int, float], core: ProgramCost, budgets: Mapping[str, float]) -> _Options:
    """In each gap the sizes that no other one beats; without budgets that is one a gap."""
    starts = list(wanted)
    columns: dict[str, Callable[[int], float]] = {"max_bytes": core.bytes, "max_capture_seconds": core.capture}
    first, rows, values = [0], [], []
    for low, high in zip(starts, [*starts[1:], starts[-1] + 1], strict=True):
        kept: list[tuple[float, ...]] = []
        # Ascending seconds, then rows: whatever beats a size comes before it.
        for seconds, size in sorted((core.replay(size), size) for size in range(low, high)):
            value = (seconds, *(columns[name](size) for name in budgets))
            if not any(all(a <= b for a, b in zip(other, value, strict=True)) for other in kept):
                kept.append(value)
                rows.append(size)
        values.extend(kept)
        first.append(len(rows))
    table = np.array(values)
    steps = np.concatenate(([0.0], np.cumsum(list(wanted.values()))))
    return _Options(steps, first, rows, table[:, 0].tolist(), table[:, 1:], np.array(list(budgets.values())))


def _affordable(options: _Options, chosen: list[int]) -> bool:
    return bool((options.used[chosen].sum(axis=0) <= options.limits).all())


def _fill_table(options: _Options, max_graphs: int, prices: Floats) -> _Table:
    """All ladders of up to ``max_graphs`` buckets, where a bucket costs the ``prices`` of what it uses, too."""
    shape = (max_graphs + 1, options.gaps + 1)
    best = np.full(shape, np.inf)
    best[0, 0] = 0.0
    table = _Table(best, np.zeros(shape, np.int64), np.zeros(shape, np.int64))
    price = (options.used @ prices).tolist()
    every = np.arange(max_graphs)
    for gap in range(options.gaps):
        steps = options.steps[gap + 1] - options.steps[: gap + 1]
        for option in options.of(gap):
            # [buckets below, gaps below]: this option serves the steps of the gaps from there up to its own.
            totals = best[:-1, : gap + 1] + options.seconds[option] * steps
            below = totals.argmin(axis=1)
            least = totals[every, below] + price[option]
            better = np.flatnonzero(least < best[1:, gap + 1]) + 1
            best[better, gap + 1] = least[better - 1]
            table.option[better, gap + 1] = option
            table.below[better, gap + 1] = below[better - 1]
    return table


class _Label(NamedTuple):
    """A ladder's upper part: it leaves ``gap`` gaps to be served by ``graphs`` more buckets. Sorted by ``bound``."""

    bound: float
    number: int
    gap: int
    graphs: int
    seconds: float
    used: tuple[float, ...]
    chosen: tuple[int, ...]


class _Front:
    """Points of which none was at most another one, in every coordinate, when it was added."""

    def __init__(self, width: int) -> None:
        self._points = np.empty((16, width))
        self._count = 0

    def add(self, point: tuple[float, ...]) -> bool:
        """Add a point unless one that is there is at most it in every coordinate; returns whether it was added."""
        points = self._points[: self._count]
        if (points <= point).all(axis=1).any():
            return False
        if self._count == len(self._points):
            self._points = np.concatenate((self._points, np.empty_like(self._points)))
        self._points[self._count] = point
        self._count += 1
        return True


class _Search:
    """Branch and bound under binding budgets, best bound first.

    With prices p >= 0 on the budgets, ``seconds + p * (used - limits)`` is never above the seconds of a ladder within
    them, so its minimum over all ways to complete a label, which `_fill_table` knows, bounds what the label can become
    (Lagrangian relaxation). Prices near the dual optimum make the bound tight; any are right. A label is dropped if one
    with the same gaps to serve is at least as good in buckets, seconds and every budget.
    """

    def __init__(self, options: _Options, max_graphs: int) -> None:
        self._options = options
        self._max_graphs = max_graphs
        top = options.first[-2]
        self._best = options.seconds[top] * float(options.steps[-1])
        self._chosen: tuple[int, ...] = (top,)  # the top bucket alone is within the budgets
        self._prices = np.zeros(len(options.limits))
        self._raise_prices()
        priced = _fill_table(options, max_graphs, self._prices)
        self._rest = np.minimum.accumulate(priced.best, axis=0)  # with at most k buckets
        self._least = np.array([options.used[options.of(gap)].min(axis=0) for gap in range(options.gaps)])
        self._done = [_Front(2 + len(options.limits)) for _ in range(options.gaps + 1)]

    def run(self) -> list[int]:
        """The options of the best ladder within the budgets."""
        options = self._options
        heap = [_Label(-np.inf, 0, options.gaps, self._max_graphs, 0.0, (0.0,) * len(options.limits), ())]
        numbers = count(1)
        while heap and heap[0].bound < self._best:
            label = heapq.heappop(heap)
            if not self._done[label.gap].add((-label.graphs, label.seconds, *label.used)):
                continue
            for option in options.of(label.gap - 1):
                for child in self._children(label, option, numbers):
                    heapq.heappush(heap, child)
        return list(self._chosen)

    def _children(self, label: _Label, option: int, numbers: Iterator[int]) -> Iterator[_Label]:
        """The labels that ``option`` makes of ``label``, by how far down it serves; notes those that are complete."""
        options, gap, graphs = self._options, label.gap, label.graphs - 1
        used = np.array(label.used) + options.used[option]
        seconds = label.seconds + options.seconds[option] * (options.steps[gap] - options.steps[:gap])
        if (used > options.limits).any():
            return
        chosen = (*label.chosen, option)
        if seconds[0] < self._best:
            self._best, self._chosen = float(seconds[0]), chosen
        bounds = seconds + self._prices @ (used - options.limits) + self._rest[graphs, :gap]
        open_ = bounds[1:] < self._best
        open_ &= (used + self._least[: gap - 1] <= options.limits).all(axis=1)
        for below in (np.flatnonzero(open_) + 1).tolist():
            yield _Label(
                float(bounds[below]), next(numbers), below, graphs, float(seconds[below]), tuple(used.tolist()), chosen
            )

    def _raise_prices(self) -> None:
        """Prices near the best bound: subgradient steps of Polyak's length, halved when they no longer help.

        A ladder within the budgets that is met on the way, and is the best so far, is kept.
        """
        options, limits = self._options, np.maximum(self._options.limits, np.finfo(float).tiny)
        prices, bound, length, idle = self._prices, -np.inf, 1.0, 0
        for _ in range(PRICE_STEPS):
            table = _fill_table(options, self._max_graphs, prices / limits)
            chosen = table.sizes(options)
            if _affordable(options, chosen) and (seconds := _seconds_of(options, chosen)) < self._best:
                self._best, self._chosen = seconds, tuple(chosen)
            value = float(table.best[:, -1].min() - prices.sum())
            if value > bound:
                self._prices, bound, idle = prices / limits, value, 0
            elif (idle := idle + 1) % 4 == 0:
                length /= 2
            excess = options.used[chosen].sum(axis=0) / limits - 1
            if not excess.any():
                break
            prices = np.maximum(0.0, prices + length * (self._best - value) / (excess @ excess) * excess)


def _seconds_of(options: _Options, chosen: list[int]) -> float:
    """Seconds of all steps on a ladder, given from its top down."""
    gaps = [bisect_right(options.first, option) for option in chosen]
    total = 0.0
    for option, gap, below in zip(chosen, gaps, [*gaps[1:], 0], strict=True):
        total += options.seconds[option] * float(options.steps[gap] - options.steps[below])
    return total
