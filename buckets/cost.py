"""What a step costs: measured seconds of the recorded programs, interpolated between the buckets measured."""

import json
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from wavegraph.errors import ConfigError

ASSUMED_FIXED_ROWS = 16
"""Without measurements, a replay is taken to cost as much as its rows and this many more: the weights are read once."""


@dataclass(frozen=True, slots=True)
class ProgramCost:
    """One recorded program (CORE or CODA) at the buckets measured, by ascending rows.

    ``seconds`` of a replay without the term of attended positions; ``capture_seconds`` and ``capture_bytes`` of
    recording one bucket.
    """

    rows: tuple[int, ...]
    seconds: tuple[float, ...]
    capture_seconds: tuple[float, ...]
    capture_bytes: tuple[int, ...]

    def __post_init__(self) -> None:
        lengths = {len(column) for column in (self.rows, self.seconds, self.capture_seconds, self.capture_bytes)}
        if lengths != {len(self.rows)} or not self.rows:
            raise ConfigError(
                f"cost model: columns of lengths {sorted(lengths)}; give one value a measured bucket, not none"
            )
        if self.rows[0] < 1 or any(a >= b for a, b in zip(self.rows, self.rows[1:], strict=False)):
            raise ConfigError(f"cost model: rows must ascend from at least 1, got {list(self.rows)}")
        for column in (self.seconds, self.capture_seconds, self.capture_bytes):
            if not all(0 <= value < float("inf") for value in column):
                raise ConfigError(f"cost model: seconds and bytes must be finite and at least 0, got {list(column)}")

    def replay(self, rows: int) -> float:
        """Seconds of a replay at a bucket of ``rows`` rows."""
        return _interpolate(self.rows, self.seconds, rows)

    def capture(self, rows: int) -> float:
        """Seconds to record a bucket of ``rows`` rows."""
        return _interpolate(self.rows, self.capture_seconds, rows)

    def bytes(self, rows: int) -> int:
        """Bytes that a recording of ``rows`` rows keeps."""
        return round(_interpolate(self.rows, self.capture_bytes, rows))


@dataclass(frozen=True, slots=True)
class CostModel:
    """Seconds of a step: terms of the core's bucket, of the positions attended, of the coda's bucket, of the host.

    A row at position p attends p + 1 positions; ``seconds_per_position`` is for all layers of one such pair of row and
    position. ``host_seconds`` is what a step costs besides its replays. ``error`` is the median relative error of
    predictions against measurements that were left out of the fit (0 if nothing was). ``source`` says where it is from.
    """

    core: ProgramCost
    coda: ProgramCost | None = None
    seconds_per_position: float = 0.0
    host_seconds: float = 0.0
    error: float = 0.0
    source: str = "assumed"

    @property
    def measured(self) -> bool:
        """Whether the seconds are real ones, and not merely in proportion to each other."""
        return self.source != "assumed"

    @classmethod
    def assumed(cls, max_rows: int) -> "CostModel":
        """For use before anything was measured: right in its proportions at best, so its seconds mean nothing."""
        rows = (1, max_rows) if max_rows > 1 else (1,)
        seconds = tuple(float(ASSUMED_FIXED_ROWS + size) for size in rows)
        zeros = (0,) * len(rows)
        return cls(ProgramCost(rows, seconds, tuple(map(float, zeros)), zeros))

    def step_seconds(self, bucket: int, positions: int = 0, coda_bucket: int = 0) -> float:
        """Seconds of a step; a bucket of 0 stands for no replay of that program."""
        seconds = self.host_seconds + positions * self.seconds_per_position
        if bucket:
            seconds += self.core.replay(bucket)
        if coda_bucket and self.coda is not None:
            seconds += self.coda.replay(coda_bucket)
        return seconds

    def to_dict(self) -> dict[str, Any]:
        """JSON types; `from_dict` reads it back."""
        return asdict(self)

    @classmethod
    def from_file(cls, path: str | Path) -> "CostModel":
        """Read the JSON of `to_dict`, or a whole profile that holds it as ``cost``.

        Raises `ConfigError` if ``path`` cannot be read or holds something else.
        """
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"cost model: {path} cannot be read ({error}); give a file of measured costs") from error
        return cls.from_dict(data["cost"] if isinstance(data, dict) and "cost" in data else data)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "CostModel":
        """Raises `ConfigError` if ``data`` is not what `to_dict` wrote."""
        try:
            core, coda = data["core"], data["coda"]
            return cls(
                _program(core),
                _program(coda) if coda is not None else None,
                float(data["seconds_per_position"]),
                float(data["host_seconds"]),
                float(data["error"]),
                str(data["source"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"cost model: {error!r} is missing or of a wrong type; measure it anew") from error


def _program(data: Mapping[str, Any]) -> ProgramCost:
    return ProgramCost(
        tuple(int(value) for value in data["rows"]),
        tuple(float(value) for value in data["seconds"]),
        tuple(float(value) for value in data["capture_seconds"]),
        tuple(int(value) for value in data["capture_bytes"]),
    )


def _interpolate(xs: Sequence[int], ys: Sequence[float], x: int) -> float:
    """Piecewise linear through the points; the last slope goes on above them, the first value below. Never negative."""
    if x <= xs[0] or len(xs) == 1:
        return ys[0]
    right = min(bisect_left(xs, x), len(xs) - 1)
    left = right - 1
    slope = (ys[right] - ys[left]) / (xs[right] - xs[left])
    return max(0.0, ys[left] + slope * (x - xs[left]))
