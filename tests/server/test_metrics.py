"""The page of metrics: every name, true values, totals that never fall, few series."""

import re

import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.drive import build, run
from wavegraph.engine.engine import Engine
from wavegraph.sampling import SamplingParams
from wavegraph.scheduler.plan import PaddingReason
from wavegraph.server.metrics import Metrics

Page = dict[str, dict[tuple[tuple[str, str], ...], float]]

GAUGES = {"num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "kv_pages", "swapped_pages"}
COUNTERS = {
    "prefix_cache_hits",
    "prefix_cache_queries",
    "prompt_tokens",
    "generation_tokens",
    "request_success",
    "request_failures",
    "num_preemptions",
    "steps",
    "rows",
    "coda_rows",
    "coda_padding_rows",
    "padding_rows",
    "bucket_hits",
    "bucket_misses",
    "replay_seconds",
    "swapped_pages_moved",
}
HISTOGRAMS = {
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
}


def families(engine: Engine) -> dict[str, Metric]:
    text = Metrics("tiny").render(engine.stats()).decode()
    return {family.name: family for family in text_string_to_metric_families(text)}


def page(engine: Engine) -> Page:
    """Values by sample name and labels; the model's name is looked at and left out."""
    found: Page = {}
    for family in families(engine).values():
        for sample in family.samples:
            labels = dict(sample.labels)
            if family.name.startswith("wavegraph:"):
                assert labels.pop("model_name") == "tiny"
            found.setdefault(sample.name, {})[tuple(sorted(labels.items()))] = sample.value
    return found


def value(found: Page, name: str, **labels: str) -> float:
    return found[f"wavegraph:{name}"][tuple(sorted(labels.items()))]


def serve(engine: Engine, name: str, prompt: int, tokens: int, first: int = 1) -> None:
    engine.add_request(name, list(range(first, first + prompt)), SamplingParams(max_tokens=tokens, ignore_eos=True))


def test_every_name_is_there_before_anything_ran() -> None:
    engine = build()
    found = families(engine)
    for names, kind in ((GAUGES, "gauge"), (COUNTERS, "counter"), (HISTOGRAMS, "histogram")):
        for name in names:
            assert found[f"wavegraph:{name}"].type == kind, name
            assert found[f"wavegraph:{name}"].documentation.endswith("."), name
    ours = {name.removeprefix("wavegraph:") for name in found if name.startswith("wavegraph:")}
    assert ours == GAUGES | COUNTERS | HISTOGRAMS
    assert found["process_resident_memory_bytes"].samples[0].value > 0
    engine.close()


def test_the_values_of_a_script() -> None:
    engine = build(num_pages=40)
    serve(engine, "first", 11, 5)
    engine.step()
    serve(engine, "waits", 3, 1)
    now = page(engine)
    assert value(now, "num_requests_running") == 1
    assert value(now, "num_requests_waiting") == 1
    assert value(now, "kv_cache_usage_perc") == 3 / 40
    assert value(now, "kv_pages", state="held") == 3
    run(engine)
    serve(engine, "again", 11, 2)
    engine.step()
    engine.abort("again")
    run(engine)
    now, stats = page(engine), engine.stats()
    assert value(now, "request_success_total", finished_reason="length") == 2
    assert value(now, "request_success_total", finished_reason="abort") == 1
    assert value(now, "request_success_total", finished_reason="stop") == 0
    assert value(now, "prompt_tokens_total") == value(now, "prefix_cache_queries_total") == 25
    assert value(now, "prefix_cache_hits_total") == 8
    assert value(now, "generation_tokens_total") == 6
    assert value(now, "time_to_first_token_seconds_count") == 2
    assert value(now, "inter_token_latency_seconds_count") == 4
    assert value(now, "request_queue_time_seconds_count") == 3
    assert value(now, "e2e_request_latency_seconds_count") == 2
    assert value(now, "num_requests_running") == value(now, "num_requests_waiting") == 0
    states = {state: value(now, "kv_pages", state=state) for state in ("held", "cached", "free")}
    assert states == {"held": 0, "cached": stats.cached_pages, "free": 40 - stats.cached_pages}
    engine.close()


def test_rows_steps_and_buckets_add_up() -> None:
    engine = build()
    serve(engine, "one", 23, 4)
    for _ in range(6):
        engine.step()
    serve(engine, "two", 30, 3, first=50)
    run(engine)
    now, stats = page(engine), engine.stats()
    steps = {kind: value(now, "steps_total", kind=kind) for kind in ("prompt", "decode", "mixed", "coda")}
    assert sum(steps.values()) == stats.scheduler.steps
    assert steps["prompt"] > 0
    assert steps["decode"] > 0
    assert steps["mixed"] > 0
    rows = {kind: value(now, "rows_total", kind=kind) for kind in ("prompt", "decode")}
    assert rows == {"prompt": 4 * (23 + 30), "decode": 4 * (3 + 2)}
    hits = now["wavegraph:bucket_hits_total"]
    sizes = {int(dict(labels)["bucket"]): count for labels, count in hits.items() if dict(labels)["program"] == "core"}
    assert set(sizes) <= set(engine.sizes.ladder.sizes)
    assert sum(sizes.values()) == steps["prompt"] + steps["decode"] + steps["mixed"]
    reasons = now["wavegraph:padding_rows_total"]
    assert {dict(labels)["reason"] for labels in reasons} == {reason.value for reason in PaddingReason if reason.value}
    padding = sum(reasons.values())
    assert sum(size * count for size, count in sizes.items()) == sum(rows.values()) + padding
    assert value(now, "coda_rows_total") == 7
    assert value(now, "replay_seconds_total", program="core") > 0
    engine.close()


def test_totals_never_fall_and_series_stay_few() -> None:
    engine = build(num_pages=10)  # so few that requests are preempted
    before = page(engine)
    count = 0
    for round_ in range(6):
        for index in range(4):
            serve(engine, f"{round_}-{index}", 5 + 3 * index, 8, first=40 * index)
        for _ in range(20):
            engine.step()
            now = page(engine)
            for name, series in before.items():
                if re.search(r"_(total|count|sum|bucket)$", name):
                    for labels, old in series.items():
                        assert now[name][labels] >= old, (name, labels)
            before = now
        run(engine)
        count = count or sum(map(len, page(engine).values()))
    after = sum(map(len, page(engine).values()))
    assert after - count <= len(engine.sizes.ladder.sizes) + len(engine.sizes.coda_ladder.sizes)
    assert value(page(engine), "num_preemptions_total") > 0
    engine.close()


@pytest.mark.parametrize("name", ['quo"ted', "two\nlines", "back\\slash", "naïve"])
def test_any_name_of_a_model_is_a_label(name: str) -> None:
    engine = build()
    text = Metrics(name).render(engine.stats()).decode()
    (sample,) = next(
        family.samples
        for family in text_string_to_metric_families(text)
        if family.name == "wavegraph:num_requests_running"
    )
    assert sample.labels == {"model_name": name}
    engine.close()
