"""What an engine has done and how full it is."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from wavegraph.capture.executor import ExecutorStats
from wavegraph.engine.histograms import LatencyHistograms
from wavegraph.scheduler.stats import SchedulerStats


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot. Counts are totals since the start; two of them can be subtracted field by field.

    ``scheduler`` counts steps and rows, ``executor`` replays by program and bucket, misses by reason, and swaps.
    Pages are of the KV pool; ``cached_pages`` are free but hold a known prefix. ``prefix_queries`` and
    ``prefix_hits`` count prompt tokens. ``finished`` counts requests by reason; ``failures`` those that
    ended with "error", or could not be taken in, by cause (`wavegraph.engine.fence.CAUSES`). ``latencies`` are
    histograms of their times.
    """

    running: int
    waiting: int
    pages: int
    free_pages: int
    cached_pages: int
    swapped_pages: int
    preemptions: int
    prefix_queries: int
    prefix_hits: int
    prompt_tokens: int
    output_tokens: int
    finished: dict[str, int]
    failures: dict[str, int]
    latencies: LatencyHistograms
    scheduler: SchedulerStats
    executor: ExecutorStats

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types; counts by bucket or reason become objects with string keys."""
        return {entry.name: _plain(getattr(self, entry.name)) for entry in fields(self)}


def _plain(value: Any) -> Any:
    # Not `dataclasses.asdict`: it takes a Counter for a sequence of pairs.
    if is_dataclass(value):
        return {entry.name: _plain(getattr(value, entry.name)) for entry in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    return value
