"""From measured replays to a cost model, and how far its predictions are off."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from wavegraph.buckets.cost import CostModel, ProgramCost
from wavegraph.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ReplayTime:
    """Replays of one bucket at one context: ``positions`` attended by all rows together, seconds of ``runs`` replays.

    ``median`` with the 10th and 90th percentile, ``low`` and ``high``. ``context`` is the position after a span's last
    row; 0 where nothing is attended.
    """

    context: int
    positions: int
    median: float
    low: float
    high: float
    runs: int

    @classmethod
    def of(cls, context: int, positions: int, seconds: Sequence[float]) -> "ReplayTime":
        """Summarise at least one replay."""
        ordered = sorted(seconds)
        last = len(ordered) - 1
        low, high = ordered[round(last * 0.1)], ordered[round(last * 0.9)]
        return cls(context, positions, statistics.median(ordered), low, high, len(ordered))


@dataclass(frozen=True, slots=True)
class BucketMeasure:
    """One recorded bucket: what its recording took, and its replays by ascending context.

    ``capture_bytes`` is what the recording keeps; ``nodes`` the operator calls or kernels of a replay, 0 where the
    backend has none.
    """

    rows: int
    capture_seconds: float
    capture_bytes: int
    nodes: int
    replays: tuple[ReplayTime, ...]

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "BucketMeasure":
        """Read back what `dataclasses.asdict` made of one."""
        return cls(**{**data, "replays": tuple(ReplayTime(**replay) for replay in data["replays"])})


def fit_cost(
    core: Sequence[BucketMeasure],
    coda: Sequence[BucketMeasure] = (),
    *,
    host_seconds: float = 0.0,
    source: str = "measured",
) -> CostModel:
    """The cost model of measured buckets, each in any order.

    The seconds of a position attended are one number for all buckets: the slope, within the buckets, of median seconds
    over positions, by least squares of relative errors. What is left of a bucket's medians is its own term; one that
    is less than a smaller bucket's is believed only beyond the spread of both. The error is the median of
    `left_out_errors`. Raises `ConfigError` if no bucket of the core was measured.
    """
    measured = [each for each in core if each.replays]
    if not measured:
        raise ConfigError("cost model: no bucket of the core was measured; measure at least one")
    slope = _slope(measured)
    head = [each for each in coda if each.replays]
    errors = left_out_errors(measured)
    return CostModel(
        core=_program(measured, slope),
        coda=_program(head, 0.0) if head else None,
        seconds_per_position=slope,
        host_seconds=host_seconds,
        error=statistics.median(errors) if errors else 0.0,
        source=source,
    )


def left_out_errors(core: Sequence[BucketMeasure]) -> list[float]:
    """Relative errors of all replays of each bucket, predicted from the other buckets alone.

    The smallest and the largest bucket are not left out: the model is asked between them, never beyond.
    """
    ordered = sorted(core, key=lambda each: each.rows)
    errors = []
    for index in range(1, len(ordered) - 1):
        others = [*ordered[:index], *ordered[index + 1 :]]
        slope = _slope(others)
        program = _program(others, slope)
        for replay in ordered[index].replays:
            predicted = program.replay(ordered[index].rows) + slope * replay.positions
            errors.append(abs(predicted / max(replay.median, 1e-9) - 1))
    return errors


def _slope(measured: Sequence[BucketMeasure]) -> float:
    """Seconds a position, at least 0: weighted least squares with an intercept for each bucket."""
    covariance = variance = 0.0
    for bucket in measured:
        weights = _weights(bucket)
        mean_x = _mean([replay.positions for replay in bucket.replays], weights)
        mean_y = _mean([replay.median for replay in bucket.replays], weights)
        for weight, replay in zip(weights, bucket.replays, strict=True):
            covariance += weight * (replay.positions - mean_x) * (replay.median - mean_y)
            variance += weight * (replay.positions - mean_x) ** 2
    return max(0.0, covariance / variance) if variance else 0.0


def _program(measured: Sequence[BucketMeasure], slope: float) -> ProgramCost:
    ordered = sorted(measured, key=lambda each: each.rows)
    return ProgramCost(
        tuple(bucket.rows for bucket in ordered),
        tuple(_believable([_Block.of(bucket, slope) for bucket in ordered])),
        tuple(bucket.capture_seconds for bucket in ordered),
        tuple(bucket.capture_bytes for bucket in ordered),
    )


@dataclass(frozen=True, slots=True)
class _Block:
    """Buckets next to each other, and their common seconds: the median, the 10th and 90th percentile."""

    buckets: int
    median: float
    low: float
    high: float

    @classmethod
    def of(cls, bucket: BucketMeasure, slope: float) -> "_Block":
        """A bucket's own term: what positions do not account for, averaged over contexts."""
        weights = _weights(bucket)
        columns = ([getattr(replay, name) for replay in bucket.replays] for name in ("median", "low", "high"))
        attended = slope * _mean([replay.positions for replay in bucket.replays], weights)
        median, low, high = (max(0.0, _mean(column, weights) - attended) for column in columns)
        return cls(1, median, low, high)

    def joined(self, other: "_Block") -> "_Block":
        weights = (self.buckets, other.buckets)
        pairs = ((getattr(self, name), getattr(other, name)) for name in ("median", "low", "high"))
        return _Block(sum(weights), *(_mean(pair, weights) for pair in pairs))


def _believable(blocks: Sequence[_Block]) -> list[float]:
    """Seconds of each bucket, where one that is faster than a smaller one is only believed beyond the spread of both.

    Otherwise both get their mean (isotonic regression by pooling adjacent violators): an optimiser would look for
    nothing so keenly as for buckets that were fast by chance.
    """
    pooled: list[_Block] = []
    for block in blocks:
        while pooled and block.median < pooled[-1].median and block.high >= pooled[-1].low:
            block = pooled.pop().joined(block)
        pooled.append(block)
    return [block.median for block in pooled for _ in range(block.buckets)]


def _weights(bucket: BucketMeasure) -> list[float]:
    """For errors relative to the seconds measured."""
    return [1 / max(replay.median, 1e-9) ** 2 for replay in bucket.replays]


def _mean(values: Sequence[float], weights: Sequence[float]) -> float:
    return sum(value * weight for value, weight in zip(values, weights, strict=True)) / sum(weights)
