"""Latencies of requests from the times at which their tokens were seen. Imports no torch."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from math import ceil


@dataclass(frozen=True, slots=True)
class Percentiles:
    """The value that 50, 90 and 99 % of the values do not exceed: each is one of them."""

    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Percentiles | None":
        """None without values."""
        if not values:
            return None
        ordered = sorted(values)
        return cls(*(ordered[ceil(len(ordered) * percent / 100) - 1] for percent in (50, 90, 99)))

    def to_dict(self) -> dict[str, float]:
        """JSON types."""
        return asdict(self)


@dataclass(slots=True)
class Timeline:
    """When a request arrived, and when each of its tokens was seen, on one clock."""

    arrival: float
    tokens: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Latencies:
    """Of all requests together, on the clock of their timelines; None where no request had such a thing.

    ``ttft``: from arrival to the first token. ``itl``: every gap between two tokens. ``tpot``: of each request with two
    tokens or more, the mean gap. ``e2e``: from arrival to the last token.
    """

    ttft: Percentiles | None
    itl: Percentiles | None
    tpot: Percentiles | None
    e2e: Percentiles | None

    @classmethod
    def of(cls, timelines: Sequence[Timeline]) -> "Latencies":
        """Requests without a token are left out."""
        seen = [each for each in timelines if each.tokens]
        return cls(
            Percentiles.of([each.tokens[0] - each.arrival for each in seen]),
            Percentiles.of([after - before for each in seen for before, after in pairwise(each.tokens)]),
            Percentiles.of(
                [(t[-1] - t[0]) / (len(t) - 1) for each in seen if len(t := each.tokens) > 1],
            ),
            Percentiles.of([each.tokens[-1] - each.arrival for each in seen]),
        )

    def to_dict(self) -> dict[str, dict[str, float] | None]:
        """JSON types."""
        return asdict(self)
