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
    over positions, by least squares of relative errors. What is left of a bucket's medians is its own term. The error
    is that of `left_out_errors`, its median. Raises `ConfigError` if no bucket of the core was measured.
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
    seconds = []
    for bucket in ordered:
        weights = _weights(bucket)
        own = [replay.median - slope * replay.positions for replay in bucket.replays]
        seconds.append(max(0.0, _mean(own, weights)))
    return ProgramCost(
        tuple(bucket.rows for bucket in ordered),
        tuple(seconds),
        tuple(bucket.capture_seconds for bucket in ordered),
        tuple(bucket.capture_bytes for bucket in ordered),
    )


def _weights(bucket: BucketMeasure) -> list[float]:
    """For errors relative to the seconds measured."""
    return [1 / max(replay.median, 1e-9) ** 2 for replay in bucket.replays]


def _mean(values: Sequence[float], weights: Sequence[float]) -> float:
    return sum(value * weight for value, weight in zip(values, weights, strict=True)) / sum(weights)
