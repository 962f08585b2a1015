"""How many of the ready rows a step runs, and at which bucket: fill a small one, pad a large one, or split."""

from collections.abc import Callable

from wavegraph.buckets.cost import CostModel
from wavegraph.buckets.ladder import Ladder
from wavegraph.errors import ConfigError


class Assembly:
    """Chooses rows and bucket of one step after another, by predicted seconds.

    ``budget`` is the most rows of a step; it may be less than the top bucket. S(r) is the predicted seconds of a step
    of r rows at the cheapest bucket that holds them, without attended positions. For ``ready`` rows:

    - *steady*: at least as many rows follow as are ready, so every step meets the same choice, and the bucket with the
      most live rows a second is best: the largest ``r / S(r)``, r being a bucket's size or all rows that are ready;
    - *draining*: fewer follow. With T(n) the least seconds in which steps can get through n rows, the r is best that
      has the least ``S(r) + T(ready - r + following)``; if none follow, that is the cheapest sequence for ``ready``.

    Ties go to more rows, and to smaller buckets. All is tabulated here, so that a choice costs a few look-ups,
    whatever the ladder. ``fewest`` is the smallest number of rows that a step runs while it leaves some out (``budget``
    if none does): a row with k ready rows before it is left out at most ``k // fewest`` times. Raises `ConfigError` if
    the ladder does not reach the budget.
    """

    def __init__(self, ladder: Ladder, cost: CostModel, budget: int) -> None:
        if budget > ladder.max:
            raise ConfigError(f"ladder: {ladder} holds no step of {budget} rows; add a bucket, or lower the row budget")
        self._bucket, self._seconds = _cheapest(ladder, cost, budget)
        ends = sorted({min(size, budget) for size in ladder.sizes})
        self._least, self._first = _drain(ends, self._seconds)
        self._filled, self._steady = _steady(set(ends), self._seconds)
        choices = [{self._steady[rows], *self._candidates(rows)} for rows in range(budget + 1)]
        self._certain = [found == {rows} for rows, found in enumerate(choices)]
        self.fewest = min((min(found) for rows, found in enumerate(choices) if min(found) < rows), default=budget)

    def bucket(self, rows: int) -> int:
        """The cheapest bucket that holds ``rows`` rows (1 .. budget)."""
        return self._bucket[rows]

    def rows(self, ready: int, following: Callable[[], int]) -> int:
        """How many of ``ready`` rows (1 .. budget) to run now.

        ``following`` tells how many rows a step that runs them all makes ready; it is asked only where it matters.
        """
        if self._certain[ready]:
            return ready
        follow = following()
        if follow >= ready:
            return self._steady[ready]
        seconds, least = self._seconds, self._least
        return min(self._candidates(ready), key=lambda rows: (seconds[rows] + least[ready - rows + follow], -rows))

    def _candidates(self, ready: int) -> tuple[int, int, int]:
        return self._first[ready], self._filled[ready], ready


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


def _drain(ends: list[int], seconds: list[float]) -> tuple[list[float], list[int]]:
    """T(n) for n up to twice the budget, and the rows of the first, largest step of the cheapest sequence."""
    steps = [(rows, seconds[rows]) for rows in ends]
    least, first = [0.0], [0]
    for rows in range(1, 2 * len(seconds) - 1):
        total, negative = min((own + least[max(0, rows - size)], -size) for size, own in steps)
        least.append(total)
        first.append(min(rows, -negative))
    return least, first[: len(seconds)]


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
