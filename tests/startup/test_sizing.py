"""Whatever the options, the limits, ladders and pools agree, and every batch that can be planned has a bucket."""

import logging
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from wavegraph.capture.buffers import page_bytes
from wavegraph.config import DEFAULT_KV_CACHE_BYTES, DEFAULT_MODEL_LEN, EngineConfig
from wavegraph.errors import ConfigError
from wavegraph.model.config import OuroConfig
from wavegraph.scheduler.plan import RequestSpec, StepResult
from wavegraph.scheduler.scheduler import Scheduler
from wavegraph.startup import sizing
from wavegraph.startup.sizing import Sizes, derive, memory_bytes

MODEL = OuroConfig.from_file(Path(__file__).parents[1] / "goldens" / "tiny")  # 65,536 positions, 4 depths
PAGE_BYTES = page_bytes(MODEL, 16, torch.float32)


def sizes_of(**options: object) -> Sizes:
    return derive(EngineConfig(**options), MODEL, torch.float32)  # type: ignore[arg-type]


@settings(max_examples=60)
@given(
    budget=st.integers(1, 300),
    max_num_seqs=st.integers(1, 80),
    buckets=st.none() | st.sets(st.integers(1, 300), min_size=1).map(lambda sizes: tuple(sorted(sizes))),
)
def test_every_batch_that_the_limits_allow_has_a_bucket(
    budget: int, max_num_seqs: int, buckets: tuple[int, ...] | None
) -> None:
    if buckets is not None:
        budget = max(buckets)
    sizes = sizes_of(max_num_batched_tokens=budget, max_num_seqs=max_num_seqs, buckets=buckets)
    for rows in range(1, sizes.scheduler.max_num_batched_tokens + 1):
        assert rows <= sizes.ladder.bucket(rows) <= sizes.limits.max_rows
    for rows in range(1, min(max_num_seqs, budget) + 1):
        assert rows <= sizes.coda_ladder.bucket(rows) <= sizes.limits.max_coda_rows
    assert sizes.ladder.max == sizes.limits.max_rows
    assert sizes.coda_ladder.max == sizes.limits.max_coda_rows


def test_a_target_is_for_a_token_of_as_many_steps_as_loops() -> None:
    assert sizes_of(target_itl_ms=50).scheduler.target_step_seconds == 0.05 / 4
    assert sizes_of().scheduler.target_step_seconds is None


@settings(max_examples=40)
@given(
    wavefront=st.booleans(),
    chunk=st.just("auto") | st.integers(1, 40),
    packing=st.sampled_from(["fill", "fifo"]),
    budget=st.integers(1, 40),
    max_num_seqs=st.integers(1, 12),
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=12),
)
def test_no_plan_exceeds_the_limits(
    wavefront: bool, chunk: int | str, packing: str, budget: int, max_num_seqs: int, lengths: list[int]
) -> None:
    sizes = sizes_of(
        wavefront=wavefront,
        prefill_chunk_size=chunk,
        packing=packing,
        max_num_batched_tokens=budget,
        max_num_seqs=max_num_seqs,
        max_model_len=64,
        page_size=2,
    )
    scheduler = Scheduler(sizes.scheduler, sizes.ladder, sizes.coda_ladder)
    for index, length in enumerate(lengths):
        scheduler.add(RequestSpec(str(index), [1] * length, 3))
    limits = sizes.limits
    while (plan := scheduler.plan()) is not None:
        assert plan.bucket <= limits.max_rows
        assert plan.coda_bucket <= limits.max_coda_rows
        assert len(plan.span_slot) <= limits.max_spans
        assert len(plan.token_slot) <= limits.max_rows
        scheduler.apply(plan, StepResult(plan.step_id, [1] * len(plan.coda_tasks)))
    assert not scheduler.has_unfinished


def test_the_pool_holds_every_request_at_full_length_if_that_is_little() -> None:
    assert sizes_of(max_model_len=100, max_num_seqs=3).scheduler.num_pages == 3 * 7
    assert sizes_of(max_model_len=100, max_num_seqs=3, kv_cache_bytes=1 << 40).scheduler.num_pages == 3 * 7


def test_the_default_pool_is_bounded() -> None:
    sizes = sizes_of(max_model_len=65536, max_num_seqs=1000)
    assert sizes.scheduler.num_pages == DEFAULT_KV_CACHE_BYTES // PAGE_BYTES


def test_the_pool_is_what_was_asked_for() -> None:
    assert sizes_of(num_pages=5).scheduler.num_pages == 5
    assert sizes_of(kv_cache_bytes=5 * PAGE_BYTES + 1).scheduler.num_pages == 5
    assert sizes_of(kv_cache_fraction=5.5 * PAGE_BYTES / memory_bytes()).scheduler.num_pages == 5
    with pytest.raises(ConfigError, match="kv_cache_fraction=1e-15 holds no page"):
        sizes_of(kv_cache_fraction=1e-15)


def test_the_default_pool_leaves_half_of_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizing, "memory_bytes", lambda: 1 << 30)
    assert sizes_of(max_model_len=65536, max_num_seqs=100).scheduler.num_pages == (1 << 29) // PAGE_BYTES


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"num_pages": 10**9}, r"the KV pool would take \d+ bytes, .* lower num_pages or kv_cache_bytes"),
        ({"kv_cache_bytes": 10**15, "max_num_seqs": 10**6}, "the KV pool would take"),
        ({"page_size": 10**12}, "or page_size"),
        ({"max_num_seqs": 10**11}, r"the tables of requests would take \d+ bytes, .* lower max_num_seqs"),
        ({"max_num_batched_tokens": 10**11}, "the buffers of a step would take .* lower max_num_batched_tokens"),
        ({"buckets": (10**11,)}, "the largest of buckets"),
    ],
)
def test_what_the_machine_cannot_hold_is_refused_before_it_is_built(options: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        sizes_of(**options)


def test_parts_that_fit_alone_but_not_together_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizing, "memory_bytes", lambda: 4_000_000)
    sizes_of(max_model_len=64, max_num_seqs=4, num_pages=3)
    with pytest.raises(ConfigError, match="pool, tables and buffers would take"):
        sizes_of(max_model_len=64, max_num_seqs=4, num_pages=3_900_000 // PAGE_BYTES - 1)


def test_a_pool_of_no_page_is_refused() -> None:
    with pytest.raises(ConfigError, match=f"kv_cache_bytes={PAGE_BYTES - 1} holds no page"):
        sizes_of(kv_cache_bytes=PAGE_BYTES - 1)


def test_a_longer_context_than_the_models_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_model_len=65537 exceeds the model's max_position_embeddings=65536"):
        sizes_of(max_model_len=65537)


@pytest.mark.parametrize(("options", "length"), [({}, DEFAULT_MODEL_LEN), ({"num_pages": 3}, 48)])
def test_a_cap_on_the_models_length_is_said(
    options: dict[str, int], length: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert sizes_of(**options).scheduler.max_model_len == length
    assert f"max_model_len is {length}, not the model's 65536" in caplog.text


def test_a_length_that_was_given_is_kept_and_not_spoken_of(caplog: pytest.LogCaptureFixture) -> None:
    assert sizes_of(max_model_len=4096, num_pages=3).scheduler.max_model_len == 4096
    assert not caplog.records
