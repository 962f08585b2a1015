"""How long requests and their tokens take, counted in histograms as they happen. No clock is read here."""

from bisect import bisect_left
from dataclasses import dataclass, field

from wavegraph.outputs import RequestMetrics

# vLLM's bounds, seconds, with finer ones below: what was drawn for those is right for these too.
TOKEN_BOUNDS = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
FIRST_BOUNDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
REQUEST_BOUNDS = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0),
    *(40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)


@dataclass(slots=True)
class Histogram:
    """Counts of seconds: ``counts[i]`` of those up to ``bounds[i]`` and above the bound before; the last has the rest.

    ``total`` is the sum of all of them.
    """

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def observe(self, seconds: float) -> None:
        """Take note of one value."""
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.total += seconds

    @property
    def count(self) -> int:
        """How many values there were."""
        return sum(self.counts)

    def since(self, before: "Histogram") -> "Histogram":
        """What was added after the snapshot ``before`` was taken."""
        counts = [now - then for now, then in zip(self.counts, before.counts, strict=True)]
        return Histogram(self.bounds, counts, self.total - before.total)

    def copy(self) -> "Histogram":
        """One that stays as it is now."""
        return Histogram(self.bounds, list(self.counts), self.total)

    def quantile(self, fraction: float) -> float | None:
        """About the value below which ``fraction`` of all lie: linear within a bucket. None if there were none."""
        rank = fraction * self.count
        if not self.count:
            return None
        low = 0.0
        for bound, count in zip(self.bounds, self.counts, strict=False):
            if count and rank <= count:
                return low + (bound - low) * rank / count
            rank -= count
            low = bound
        return low


@dataclass(slots=True)
class LatencyHistograms:
    """Histograms of seconds. Requests that were aborted, or failed, count only up to where they came.

    - ``first_token``: from arrival until the host saw the first token.
    - ``inter_token``: between two tokens of a request, as the host saw them.
    - ``queue``: from arrival until the request was first planned.
    - ``prefill``: from there to the first token. ``decode``: from there to the last. ``end_to_end``: all of it.
    """

    first_token: Histogram = field(default_factory=lambda: Histogram(FIRST_BOUNDS))
    inter_token: Histogram = field(default_factory=lambda: Histogram(TOKEN_BOUNDS))
    queue: Histogram = field(default_factory=lambda: Histogram(REQUEST_BOUNDS))
    prefill: Histogram = field(default_factory=lambda: Histogram(REQUEST_BOUNDS))
    decode: Histogram = field(default_factory=lambda: Histogram(REQUEST_BOUNDS))
    end_to_end: Histogram = field(default_factory=lambda: Histogram(REQUEST_BOUNDS))

    def started(self, times: RequestMetrics) -> None:
        """A request got its first token."""
        if times.time_to_first_token is not None:
            self.first_token.observe(times.time_to_first_token)
        if times.prefill_time is not None:
            self.prefill.observe(times.prefill_time)

    def finished(self, times: RequestMetrics) -> None:
        """A request came to its end."""
        if times.decode_time is not None:
            self.decode.observe(times.decode_time)
        if times.latency is not None:
            self.end_to_end.observe(times.latency)

    def copy(self) -> "LatencyHistograms":
        """A snapshot."""
        names = ("first_token", "inter_token", "queue", "prefill", "decode", "end_to_end")
        return LatencyHistograms(*(getattr(self, name).copy() for name in names))
