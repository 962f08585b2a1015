"""Histograms of times: what goes into which, and when."""

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.e2e.drive import build, run
from wavegraph.engine.histograms import Histogram, LatencyHistograms
from wavegraph.outputs import RequestMetrics
from wavegraph.sampling import SamplingParams

BOUNDS = (0.1, 0.5, 2.0)
PARAMS = SamplingParams(max_tokens=5, ignore_eos=True)


@given(st.lists(st.sampled_from(BOUNDS) | st.floats(0, 10)))
def test_every_value_is_in_the_bucket_of_the_first_bound_that_holds_it(values: list[float]) -> None:
    histogram = Histogram(BOUNDS)
    for value in values:
        histogram.observe(value)
    edges = [-1.0, *BOUNDS, 11.0]
    assert histogram.counts == [sum(low < value <= high for value in values) for low, high in pairwise(edges)]
    assert histogram.count == len(values)
    assert histogram.total == pytest.approx(sum(values))


@given(st.lists(st.floats(0, 1.99), min_size=1), st.floats(0, 1))
def test_a_quantile_is_in_the_bucket_of_the_exact_one(values: list[float], fraction: float) -> None:
    histogram = Histogram(BOUNDS)
    for value in values:
        histogram.observe(value)
    exact = sorted(values)[max(0, -int(-fraction * len(values) // 1) - 1)]
    found = histogram.quantile(fraction)
    edges = (0.0, *BOUNDS)
    low = max((edge for edge in edges if edge < exact), default=0.0)
    assert found is not None
    assert low <= found <= min(edge for edge in BOUNDS if edge >= exact)


def test_quantiles_of_nothing_and_beyond_the_last_bound() -> None:
    histogram = Histogram(BOUNDS)
    assert histogram.quantile(0.5) is None
    histogram.observe(100)
    assert histogram.quantile(0.5) == 2.0


def test_what_was_added_since_a_snapshot() -> None:
    histogram = Histogram(BOUNDS)
    histogram.observe(0.3)
    before = histogram.copy()
    histogram.observe(0.2)
    histogram.observe(3)
    assert before.counts == [0, 1, 0, 0]
    since = histogram.since(before)
    assert since.counts == [0, 1, 0, 1]
    assert since.total == pytest.approx(3.2)


def test_each_time_goes_into_its_own_histogram() -> None:
    latencies = LatencyHistograms()
    times = RequestMetrics(10.0, scheduled=11.0, first_token=14.0, finished=30.0)
    latencies.started(times)
    latencies.finished(times)
    totals = {name: getattr(latencies, name).total for name in LatencyHistograms.__slots__}
    assert totals == {
        "first_token": 4.0,
        "inter_token": 0.0,
        "queue": 0.0,  # counted when it is planned
        "prefill": 3.0,
        "decode": 16.0,
        "end_to_end": 20.0,
    }


@pytest.mark.parametrize("run_ahead", [1, 2])
def test_an_engine_counts_each_event_once(run_ahead: int) -> None:
    engine = build(async_scheduling=run_ahead > 1, run_ahead=run_ahead)
    for name in ("one", "two", "gone"):
        engine.add_request(name, [1, 2, 3], PARAMS)
    engine.step()
    engine.abort("gone")
    outputs = run(engine)
    engine.add_request("never", [1, 2], PARAMS)
    engine.abort("never")
    stats = engine.stats()
    latencies = stats.latencies
    assert latencies.first_token.count == latencies.prefill.count == 2
    assert latencies.inter_token.count == 2 * 4
    assert latencies.decode.count == latencies.end_to_end.count == 2
    assert latencies.queue.count == 3
    times = [output.metrics for output in outputs.values()]
    assert latencies.first_token.total == pytest.approx(sum(each.time_to_first_token or 0 for each in times))
    assert latencies.inter_token.total == pytest.approx(latencies.decode.total)
    for each in times:
        assert each.scheduled is not None
        assert each.first_token is not None
        assert each.arrival <= each.scheduled <= each.first_token
    json.dumps(stats.to_dict())
    engine.close()


def test_a_preempted_request_is_first_planned_once() -> None:
    engine = build()
    engine.add_request("one", list(range(1, 9)), PARAMS)
    engine.step()
    assert engine.preempt("one")
    run(engine)
    latencies = engine.stats().latencies
    assert latencies.queue.count == latencies.first_token.count == latencies.end_to_end.count == 1
    engine.close()
