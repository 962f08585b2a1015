import dataclasses
from typing import Any

import pytest

from wavegraph.config import EngineConfig
from wavegraph.errors import ConfigError


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"wavefront": 1}, "wavefront must be True or False, got 1"),
        ({"check": None}, "check must be True or False"),
        ({"prefill_chunk_size": 0}, "prefill_chunk_size must be an integer of at least 1, or 'auto', got 0"),
        ({"prefill_chunk_size": "big"}, "prefill_chunk_size must be an integer of at least 1, or 'auto', got 'big'"),
        ({"prefill_chunk_size": 2.0}, "prefill_chunk_size must be an integer"),
        ({"max_num_seqs": True}, "max_num_seqs must be an integer of at least 1, got True"),
        ({"max_num_seqs": -3}, "max_num_seqs"),
        ({"page_size": 0}, "page_size"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens"),
        ({"max_model_len": 0}, "max_model_len"),
        ({"num_pages": 0}, "num_pages"),
        ({"kv_cache_bytes": -1}, "kv_cache_bytes"),
        ({"kv_cache_fraction": 1.0}, "kv_cache_fraction must be a number between 0 and 1, got 1.0"),
        ({"kv_cache_fraction": True}, "kv_cache_fraction"),
        ({"kv_cache_fraction": float("nan")}, "kv_cache_fraction"),
        ({"kv_cache_fraction": 0.5, "num_pages": 4}, "num_pages=4 and kv_cache_fraction=0.5 both size"),
        ({"threads": 0}, "threads"),
        ({"num_pages": 4, "kv_cache_bytes": 4096}, "num_pages=4 and kv_cache_bytes=4096"),
        ({"buckets": ()}, "buckets must be None or a tuple of at least one"),
        ({"buckets": [1, 2]}, "buckets must be None or a tuple"),
        ({"buckets": (0, 2)}, "each of buckets must be an integer of at least 1, got 0"),
        ({"buckets": (1, 8), "max_num_batched_tokens": 9}, "do not reach max_num_batched_tokens=9"),
        ({"buckets": (1, 8, 16), "max_num_batched_tokens": 8}, "16 can never run"),
        ({"packing": "tight"}, "packing must be one of fill, fifo, got 'tight'"),
        ({"target_itl_ms": 0}, "target_itl_ms must be a number of milliseconds above 0, got 0"),
        ({"target_itl_ms": True}, "target_itl_ms"),
        ({"target_itl_ms": float("inf")}, "target_itl_ms"),
        ({"kv_layout": "paged"}, "kv_layout must be 'last_exited', got 'paged'"),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as refused:
        EngineConfig(**options)
    assert named in str(refused.value)


def test_shared_layout_with_wavefront_is_refused_with_the_reason() -> None:
    with pytest.raises(ConfigError, match="depends on the final-depth KV of the preceding positions"):
        EngineConfig(kv_layout="shared")


def test_shared_layout_without_wavefront_is_not_implemented() -> None:
    with pytest.raises(ConfigError, match="not implemented"):
        EngineConfig(kv_layout="shared", wavefront=False)


@pytest.mark.parametrize(
    ("options", "budget"),
    [
        ({}, 256),
        ({"max_num_batched_tokens": 7}, 7),
        ({"buckets": (4, 1, 24)}, 24),
        ({"buckets": (4, 8), "max_num_batched_tokens": 7}, 7),
    ],
)
def test_row_budget(options: dict[str, Any], budget: int) -> None:
    assert EngineConfig(**options).row_budget == budget


def test_config_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        EngineConfig().wavefront = False  # type: ignore[misc]
