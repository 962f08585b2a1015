"""``/metrics``: what an engine has done, in Prometheus' text format, under vLLM's names.

Everything is read from one snapshot of the engine's own counters when somebody asks, so that a step pays nothing. All
values of a scrape are of the same moment.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from wavegraph.engine.fence import CAUSES
from wavegraph.engine.histograms import Histogram
from wavegraph.engine.stats import EngineStats
from wavegraph.scheduler.plan import PaddingReason

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
"""Of what `Metrics.render` returns."""

PREFIX = "wavegraph:"
FINISH_REASONS = ("stop", "length", "abort", "error")
PROGRAMS = ("core", "coda", "coda_full", "copy_exits", "tables")

Values = Iterable[tuple[tuple[str, ...], float]]
"""Label values, and the value of each series."""


class Metrics:
    """The metrics of one server, in a registry of its own. Every series of the engine has the label ``model_name``."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self._process = CollectorRegistry()
        ProcessCollector(registry=self._process)

    def render(self, stats: EngineStats) -> bytes:
        """The page for one snapshot: the engine's metrics, then memory, descriptors and time of the process."""
        registry = CollectorRegistry()
        registry.register(EngineCollector(stats, self._model_name))
        return generate_latest(registry) + generate_latest(self._process)


class EngineCollector(Collector):
    """The metrics of one snapshot."""

    def __init__(self, stats: EngineStats, model_name: str) -> None:
        self._stats = stats
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        """All families; totals start at zero with the engine."""
        yield from self._requests()
        yield from self._latencies()
        yield from self._steps()
        yield from self._programs()
        yield from self._pool()

    def _requests(self) -> Iterator[Metric]:
        stats = self._stats
        yield self._gauge("num_requests_running", "Requests that hold a slot.", stats.running)
        yield self._gauge("num_requests_waiting", "Requests that wait for a slot: new, or preempted.", stats.waiting)
        yield self._counter(
            "request_success",
            "Requests that ended, by reason: stop, length, abort (the client left), error.",
            (((reason,), stats.finished.get(reason, 0)) for reason in FINISH_REASONS),
            "finished_reason",
        )
        text = "Requests that ended with an error, or could not be taken in, by cause."
        yield self._counter("request_failures", text, (((c,), stats.failures.get(c, 0)) for c in CAUSES), "cause")
        yield self._counter("num_preemptions", "Times that a request had to leave the pool.", stats.preemptions)
        yield self._counter("prompt_tokens", "Prompt tokens of the requests that came in.", stats.prompt_tokens)
        yield self._counter("generation_tokens", "Tokens generated.", stats.output_tokens)
        yield self._counter("prefix_cache_queries", "Prompt tokens looked up in the cache.", stats.prefix_queries)
        yield self._counter("prefix_cache_hits", "Prompt tokens that the prefix cache had.", stats.prefix_hits)

    def _latencies(self) -> Iterator[Metric]:
        times = self._stats.latencies
        for name, text, histogram in (
            ("time_to_first_token_seconds", "From arrival to the first token.", times.first_token),
            ("inter_token_latency_seconds", "Between two tokens of a request.", times.inter_token),
            ("e2e_request_latency_seconds", "From arrival to the end, of requests that came there.", times.end_to_end),
            ("request_queue_time_seconds", "From arrival until first planned.", times.queue),
            ("request_prefill_time_seconds", "From the first plan to the first token.", times.prefill),
            ("request_decode_time_seconds", "From the first token to the end.", times.decode),
        ):
            yield self._histogram(name, text, histogram)

    def _steps(self) -> Iterator[Metric]:
        stats = self._stats.scheduler
        mixed = stats.core_steps - stats.prompt_steps - stats.decode_steps
        kinds = {
            "prompt": stats.prompt_steps,
            "decode": stats.decode_steps,
            "mixed": mixed,
            "coda": stats.steps - stats.core_steps,
        }
        yield self._counter(
            "steps",
            "Steps by the rows they held: prompt, decode, both (mixed), or only rows that make a token (coda).",
            _by_label(kinds),
            "kind",
        )
        rows = {"prompt": stats.prompt_rows, "decode": stats.rows - stats.prompt_rows}
        yield self._counter("rows", "Live rows of CORE: one position at one depth each.", _by_label(rows), "kind")
        yield self._counter("coda_rows", "Live rows of CODA.", stats.coda_rows)
        yield self._counter("coda_padding_rows", "Rows of CODA that carried no work.", stats.coda_padding_rows)
        padding = {reason.value: stats.padding_reasons[reason] for reason in PaddingReason if reason.value}
        text = "Rows of CORE that carried no work, by the reason why the bucket was not full."
        yield self._counter("padding_rows", text, _by_label(padding), "reason")

    def _programs(self) -> Iterator[Metric]:
        programs = {name: getattr(self._stats.executor, name) for name in PROGRAMS}
        yield self._counter(
            "bucket_hits",
            "Replays of each recorded bucket, by program.",
            (((name, str(size)), hits) for name, each in programs.items() for size, hits in sorted(each.hits.items())),
            "program",
            "bucket",
        )
        yield self._counter(
            "bucket_misses",
            "Steps that no recorded bucket could run, by reason.",
            (
                ((name, reason), count)
                for name, each in programs.items()
                for reason, count in sorted(each.misses.items())
            ),
            "program",
            "reason",
        )
        yield self._counter(
            "replay_seconds",
            "The host's seconds in replays: on a CPU all of their work.",
            (((name,), each.seconds) for name, each in programs.items()),
            "program",
        )

    def _pool(self) -> Iterator[Metric]:
        stats = self._stats
        held, idle = stats.pages - stats.free_pages, stats.free_pages - stats.cached_pages
        usage = held / stats.pages
        yield self._gauge("kv_cache_usage_perc", "Part of the KV pages that requests hold; 1 is all.", usage)
        pages = {"held": held, "cached": stats.cached_pages, "free": idle}
        text = "KV pages that requests hold, that only hold a known prefix, and that are free."
        yield self._family(GaugeMetricFamily, "kv_pages", text, _by_label(pages), "state")
        yield self._gauge("swapped_pages", "KV pages of preempted requests in host memory.", stats.swapped_pages)
        swap = {"out": stats.executor.swap.pages_out, "in": stats.executor.swap.pages_in}
        text = "KV pages moved to and from host memory."
        yield self._counter("swapped_pages_moved", text, _by_label(swap), "direction")

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        return self._family(GaugeMetricFamily, name, text, [((), value)])

    def _counter(self, name: str, text: str, values: float | Values, *labels: str) -> Metric:
        series: Values = [((), values)] if isinstance(values, int | float) else values
        return self._family(CounterMetricFamily, name, text, series, *labels)

    def _family(self, kind: Any, name: str, text: str, values: Values, *labels: str) -> Metric:
        family: Any = kind(PREFIX + name, text, labels=("model_name", *labels))
        for each, value in values:
            family.add_metric((self._model_name, *each), value)
        return family  # type: ignore[no-any-return]

    def _histogram(self, name: str, text: str, histogram: Histogram) -> Metric:
        family = HistogramMetricFamily(PREFIX + name, text, labels=("model_name",))
        buckets, below = [], 0
        for bound, count in zip((*map(str, histogram.bounds), "+Inf"), histogram.counts, strict=True):
            below += count
            buckets.append((bound, float(below)))
        family.add_metric((self._model_name,), buckets, histogram.total)
        return family


def _by_label(values: Mapping[str, float]) -> Values:
    return [((label,), value) for label, value in values.items()]
