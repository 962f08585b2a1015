"""A ladder that holds for steps that were not seen: fitted on one half of a trace, scored on the other."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from wavegraph.buckets.cost import CostModel
from wavegraph.buckets.ladder import Ladder
from wavegraph.buckets.optimise import Histogram, optimise, predicted_seconds
from wavegraph.errors import ConfigError

SMOOTHINGS = (0.0, 0.01, 0.03, 0.1, 0.3)
"""Shares of all steps that may be taken to want any row count, each alike."""

BLOCKS = 16
"""Runs of steps that a trace is cut into, to be dealt to the halves."""


@dataclass(frozen=True, slots=True)
class RobustLadder:
    """The ladder for a whole trace, and how ladders made the same way did on the half they were not made from.

    Scores are predicted seconds of all steps, each half on the ladder of the other half: ``held_out_seconds``;
    ``fitted_seconds`` is the same for each half on its own unsmoothed ladder, which none within the budgets beats;
    ``unsmoothed_seconds`` is what ladders without smoothing would have scored.
    """

    ladder: Ladder
    smoothing: float
    fitted_seconds: float
    held_out_seconds: float
    unsmoothed_seconds: float

    @property
    def loss(self) -> float:
        """By what share of its seconds a ladder is worse on steps that it has not seen than the best one for them."""
        return self.held_out_seconds / self.fitted_seconds - 1 if self.fitted_seconds else 0.0


def optimise_robust(
    wanted: Sequence[int],
    cost: CostModel,
    *,
    max_graphs: int,
    max_rows: int,
    max_bytes: int | None = None,
    max_capture_seconds: float | None = None,
) -> RobustLadder:
    """The ladder for ``wanted``, the rows that each step of a trace wanted, in order; the rest as for `optimise`.

    A row count that no step happened to want may come up tomorrow. So a share of the steps is taken to want any row
    count up to ``max_rows``, all alike: the share of `SMOOTHINGS` whose ladders, each fitted on one half of the trace,
    do best on the other half. The halves are made of `BLOCKS` blocks in turn: steps that follow each other are alike,
    so single steps in turn would hide what was not seen, and the first half against the second would compare a workload
    that begins with one that ends. Raises `ConfigError` as `optimise` does, and for fewer than two steps.
    """
    if len(wanted) < 2:
        raise ConfigError(f"wanted: {len(wanted)} steps cannot be halved; give a longer workload")
    length = -(-len(wanted) // BLOCKS)
    halves: tuple[Counter[int], Counter[int]] = Counter(), Counter()
    for index, start in enumerate(range(0, len(wanted), length)):
        halves[index % 2].update(wanted[start : start + length])

    def fit(histogram: Histogram) -> Ladder:
        return optimise(
            histogram,
            cost,
            max_graphs=max_graphs,
            max_bytes=max_bytes,
            max_capture_seconds=max_capture_seconds,
            max_rows=max_rows,
        )

    own = [fit(half) for half in halves]
    fitted = sum(predicted_seconds(half, ladder, cost) for half, ladder in zip(halves, own, strict=True))
    scores = {}
    for share in SMOOTHINGS:
        ladders = [fit(smoothed(half, share, max_rows)) for half in halves] if share else own
        scores[share] = sum(
            predicted_seconds(half, ladder, cost) for half, ladder in zip(halves, reversed(ladders), strict=True)
        )
    best = min(scores, key=lambda share: scores[share])  # of equals the least smoothed
    ladder = fit(smoothed(Counter(wanted), best, max_rows))
    return RobustLadder(ladder, best, fitted, scores[best], scores[0.0])


def smoothed(histogram: Histogram, share: float, max_rows: int) -> Mapping[int, float]:
    """``histogram`` with ``share`` of its steps spread evenly over the row counts 1 to ``max_rows``."""
    if not share:
        return histogram
    each = share * sum(histogram.values()) / max_rows
    return {rows: each + (1 - share) * histogram.get(rows, 0) for rows in range(1, max_rows + 1)}
