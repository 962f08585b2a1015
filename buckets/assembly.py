"""How many of the ready rows a step runs, and at which bucket: fill a small one, pad a large one, or split."""

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from wavegraph.buckets.cost import CostModel
from wavegraph.buckets.ladder import Ladder
from wavegraph.errors import ConfigError

Seconds = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Outlook:
    """What comes after a step that runs all ready rows.

    ``following`` rows become ready with it. ``remaining`` is how many rows there are to run in all, the ready ones
    among them, if the end is in sight; None if work goes on. ``steps_after(left)`` tells how many more steps are needed
    at least if the step leaves the last ``left`` rows out.
    """

    following: int
    remaining: int | None
    steps_after: Callable[[int], int]


class Assembly:
    """Chooses rows and bucket of one step after another, by predicted seconds.

    ``budget`` is the most rows of a step; it may be less than the top bucket. S(r) is the predicted seconds of a step
    of r rows at the cheapest bucket that holds them, without attended positions, and T(n, k) the least seconds in which
    k steps or more get through n rows, each of them a filled bucket, or all rows that are ``ready`` now. What is best
    for these depends on the outlook:

    - *steady*: at least as many rows follow as are ready, so every step meets the same choice, and the bucket with the
      most live rows a second is best: the largest ``r / S(r)``, r being a bucket's size or all rows that are ready;
    - *draining*: fewer follow; the least ``S(r) + T(ready - r + following, 0)`` is best;
    - *the end in sight*: the least ``S(r) + T(remaining - r, steps_after(ready - r))`` is best. If these are the last
      steps of all rows, that is the cheapest sequence for them.

    Ties go to more rows, and to smaller buckets. All is tabulated here, so that a choice costs a few look-ups,
    whatever the ladder: T for up to ``max_path`` steps, and ``max_path + 1`` times the rows that are ready, beyond
    which there is no end in sight. ``fewest`` is the smallest number of rows that a step runs while it leaves some out
    (``budget`` if none does): a row with k ready rows before it is left out at most ``k // fewest`` times. Raises
    `ConfigError` if the ladder does not reach the budget.
    """

    def __init__(self, ladder: Ladder, cost: CostModel, budget: int, max_path: int) -> None:
        if budget > ladder.max:
            raise ConfigError(f"ladder: {ladder} holds no step of {budget} rows; add a bucket, or lower the row budget")
        self._max_path = max_path
        self._bucket, self._seconds = _cheapest(ladder, cost, budget)
        self._ends = sorted({min(size, budget) for size in ladder.sizes})
        self._least = _least_seconds(self._ends, self._seconds, max_path)
        self._filled, self._steady = _steady(set(self._ends), self._seconds)
        self._first = _first(self._ends, self._seconds)
        choices = [{self._steady[rows], *self._candidates(rows)} for rows in range(budget + 1)]
        self._certain = [found == {rows} for rows, found in enumerate(choices)]
        self.fewest = min((min(found) for rows, found in enumerate(choices) if min(found) < rows), default=budget)

    def bucket(self, rows: int) -> int:
        """The cheapest bucket that holds ``rows`` rows (1 .. budget)."""
        return self._bucket[rows]

    def rows(self, ready: int, outlook: Callable[[], Outlook]) -> int:
        """How many of ``ready`` rows (1 .. budget) to run now. ``outlook`` is asked only where it matters."""
        if self._certain[ready]:
            return ready
        then = outlook()
        total, path = then.remaining, then.steps_after
        if total is None or total > (self._max_path + 1) * ready:
            if then.following >= ready:
                return self._steady[ready]
            total, path = ready + then.following, _no_more
        seconds, best, chosen = self._seconds, 0.0, 0
        for rows in self._candidates(ready):
            after = seconds[rows] + self._then(ready, total - rows, path(ready - rows))
            if not chosen or (after, -rows) < (best, -chosen):
                best, chosen = after, rows
        return chosen

    def _then(self, ready: int, rows: int, steps: int) -> float:
        """T: some steps of as many rows as are ready now, and filled ones for the rest."""
        table = self._least[bisect_right(self._ends, ready) - 1]
        full = self._seconds[ready]
        return min(
            count * full + float(table[max(0, steps - count), max(0, rows - count * ready)])
            for count in range(-(-rows // ready) + 1)
        )

    def _candidates(self, ready: int) -> tuple[int, int, int]:
        return self._first[ready], self._filled[ready], ready


def _no_more(left: int) -> int:
    return 0


def _cheapest(ladder: Ladder, cost: CostModel, budget: int) -> tuple[list[int], list[float]]:
    """For 0 .. budget rows: the cheapest bucket, and S."""
    buckets, seconds = [0] * (budget + 1), [0.0] * (budget + 1)
    best, best_seconds = ladder.max, cost.step_seconds(ladder.max)
    for rows in range(ladder.max, 0, -1):
        if ladder.bucket(rows) == rows and (own := cost.step_seconds(rows)) <= best_seconds:
            best, best_seconds = rows, own
        if rows <= budget:
            buckets[rows], seconds[rows] = best, best_seconds
    return buckets, seconds


def _least_seconds(ends: list[int], seconds: list[float], max_path: int) -> list[Seconds]:
    """For each bucket: T of filled buckets up to it, by steps and rows (``[max_path + 1, rows]``).

    There are rows enough for all that may be ready with this bucket filled, and one step more.
    """
    tables: list[Seconds] = []
    for index, top in enumerate(ends):
        most = ends[index + 1] if index + 1 < len(ends) else top
        steps = [(rows, seconds[rows]) for rows in ends[: index + 1]]
        table = np.empty((max_path + 1, (max_path + 2) * most + 1))
        table[0] = _any_steps(steps, table.shape[1])
        for path in range(max_path):
            table[path + 1] = np.min([own + _after(table[path], rows) for rows, own in steps], axis=0)
        tables.append(table)
    return tables


def _any_steps(steps: list[tuple[int, float]], length: int) -> Seconds:
    """T(n, 0) for n below ``length``: an unbounded knapsack, one size after another, in blocks of the size."""
    least = np.full(length, np.inf)
    least[0] = 0.0
    for size, own in steps:
        least[1:size] = np.minimum(least[1:size], own)
        for start in range(size, length, size):
            block = slice(start, start + size)
            least[block] = np.minimum(least[block], own + least[start - size : start - size + len(least[block])])
    return least


def _after(least: Seconds, rows: int) -> Seconds:
    """``least`` of what a step of ``rows`` rows leaves."""
    return np.concatenate([np.full(min(rows, len(least)), least[0]), least[: max(0, len(least) - rows)]])


def _first(ends: list[int], seconds: list[float]) -> list[int]:
    """The rows of the first, largest step of the cheapest sequence for each number of rows."""
    steps = [(rows, seconds[rows]) for rows in ends]
    least, first = [0.0], [0]
    for rows in range(1, len(seconds)):
        total, negative = min((own + least[max(0, rows - size)], -size) for size, own in steps)
        least.append(total)
        first.append(min(rows, -negative))
    return first


def _steady(ends: set[int], seconds: list[float]) -> tuple[list[int], list[int]]:
    """For each number of ready rows, the rows with the most live rows a second: of filled buckets, and of any step."""
    filled, steady = [0], [0]
    best, best_seconds = 0, 1.0
    for rows, own in enumerate(seconds[1:], start=1):
        better = rows * best_seconds >= best * own
        if rows in ends and better:
            best, best_seconds = rows, own
        filled.append(best or rows)
        steady.append(rows if better else best)
    return filled, steady
