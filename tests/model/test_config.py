"""`OuroConfig`: what it accepts, and every way it refuses."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from wavegraph.errors import CheckpointError, ConfigError
from wavegraph.model.config import OuroConfig

Raw = Callable[..., dict[str, Any]]

INTEGERS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "total_ut_steps",
    "max_position_embeddings",
)
FLOATS = ("rope_theta", "rms_norm_eps")
REQUIRED = (
    *INTEGERS,
    *FLOATS,
    "model_type",
    "hidden_act",
    "tie_word_embeddings",
    "early_exit_threshold",
    "eos_token_id",
)


@pytest.mark.parametrize("name", ["tiny", "tiny_gqa", "tiny_hd32", "tiny_sharded"])
def test_public_configs_are_read(name: str, goldens: Path) -> None:
    raw = json.loads((goldens / name / "config.json").read_text())
    config = OuroConfig.from_file(goldens / name)
    assert config == OuroConfig.from_file(goldens / name / "config.json") == OuroConfig.from_dict(raw)
    for key in (*INTEGERS, *FLOATS, "tie_word_embeddings", "early_exit_threshold"):
        assert getattr(config, key) == raw[key], key
    assert config.eos_token_ids == (0,)
    assert config.dtype == "float32"


def test_head_dim_is_not_derived(raw_config: Raw) -> None:
    config = OuroConfig.from_dict(raw_config(head_dim=32))
    assert (config.q_size, config.kv_size, config.hidden_size) == (128, 64, 24)


@pytest.mark.parametrize("key", REQUIRED)
def test_missing_key_is_named(key: str, raw_config: Raw) -> None:
    with pytest.raises(ConfigError, match=rf"^{key}: "):
        OuroConfig.from_dict(raw_config(**{key: ...}))


@pytest.mark.parametrize("key", INTEGERS)
@pytest.mark.parametrize("value", [0, -1, 2**31, 8.0, True, "8", None, [8], math.nan])
def test_bad_integer_is_named(key: str, value: object, raw_config: Raw) -> None:
    with pytest.raises(ConfigError, match=rf"^{key}: must be an integer"):
        OuroConfig.from_dict(raw_config(**{key: value}))


@pytest.mark.parametrize("key", FLOATS)
@pytest.mark.parametrize("value", [0, -1.0, math.nan, math.inf, -math.inf, True, "1", None])
def test_bad_number_is_named(key: str, value: object, raw_config: Raw) -> None:
    with pytest.raises(ConfigError, match=rf"^{key}: must be a finite number"):
        OuroConfig.from_dict(raw_config(**{key: value}))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model_type", "llama"),
        ("hidden_act", "gelu"),
        ("rope_scaling", {"rope_type": "yarn", "factor": 2.0}),
        ("rope_parameters", {"rope_type": "default"}),
        ("sliding_window", 4096),
        ("use_sliding_window", True),
        ("use_sliding_window", None),
        ("early_exit_step", 2),
        ("attention_bias", True),
        ("mlp_bias", True),
        ("mlp_bias", 1),
        ("partial_rotary_factor", 0.5),
        ("partial_rotary_factor", True),
        ("rope_interleaved", True),
        ("rope_type", "yarn"),
        ("quantization_config", {"bits": 4}),
        ("head_dim", 7),
        ("num_key_value_heads", 3),
        ("layer_types", ["full_attention"]),
        ("layer_types", ["full_attention", "sliding_attention"]),
        ("layer_types", "full_attention"),
        ("tie_word_embeddings", 0),
        ("tie_word_embeddings", "false"),
        ("early_exit_threshold", math.nan),
        ("early_exit_threshold", -0.1),
        ("early_exit_threshold", True),
        ("early_exit_threshold", "1"),
        ("eos_token_id", -1),
        ("eos_token_id", 97),
        ("eos_token_id", [0, 97]),
        ("eos_token_id", True),
        ("eos_token_id", [1.0]),
        ("eos_token_id", "0"),
        ("torch_dtype", "float64"),
        ("torch_dtype", 16),
        ("dtype", "int8"),
        ("dtype", "bfloat16"),
    ],
)
def test_unsupported_value_is_named(key: str, value: object, raw_config: Raw) -> None:
    with pytest.raises(ConfigError, match=rf"^{key}: "):
        OuroConfig.from_dict(raw_config(**{key: value}))


@pytest.mark.parametrize(
    ("changes", "field", "value"),
    [
        ({"total_ut_steps": 1}, "total_ut_steps", 1),
        ({"rope_theta": 1000000}, "rope_theta", 1e6),
        ({"tie_word_embeddings": True}, "tie_word_embeddings", True),
        ({"early_exit_threshold": None}, "early_exit_threshold", None),
        ({"early_exit_threshold": 1.1}, "early_exit_threshold", 1.1),
        ({"eos_token_id": None}, "eos_token_ids", ()),
        ({"eos_token_id": [0, 2]}, "eos_token_ids", (0, 2)),
        ({"torch_dtype": ...}, "dtype", None),
        ({"torch_dtype": ..., "dtype": "float16"}, "dtype", "float16"),
        ({"torch_dtype": "bfloat16", "dtype": "bfloat16"}, "dtype", "bfloat16"),
        ({"layer_types": None}, "num_hidden_layers", 2),
        ({"rope_scaling": None, "sliding_window": None, "use_sliding_window": False}, "head_dim", 8),
        ({"attention_bias": False, "mlp_bias": False, "rope_interleaved": False}, "head_dim", 8),
        ({"partial_rotary_factor": 1.0, "rope_type": "default"}, "head_dim", 8),
        ({"attention_dropout": 0.5, "some_new_key": 1}, "head_dim", 8),
    ],
)
def test_accepted_value(changes: dict[str, Any], field: str, value: object, raw_config: Raw) -> None:
    assert getattr(OuroConfig.from_dict(raw_config(**changes)), field) == value


def test_config_is_frozen(raw_config: Raw) -> None:
    config = OuroConfig.from_dict(raw_config())
    with pytest.raises(AttributeError):
        config.head_dim = 16  # type: ignore[misc]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b"[1]", "must hold a JSON object, got list"),
        (b'{"head_dim": 8, "head_dim": 16}', "'head_dim' is given twice"),
    ],
)
def test_file_that_is_no_config(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        OuroConfig.from_file(tmp_path)


def test_missing_or_unreadable_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json: no such file"):
        OuroConfig.from_file(tmp_path)
    (tmp_path / "config.json").mkdir()
    with pytest.raises(CheckpointError, match=r"config\.json: cannot be read"):
        OuroConfig.from_file(tmp_path)


def test_nan_in_a_file_is_refused(raw_config: Raw, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(raw_config(rope_theta=math.nan)))
    with pytest.raises(ConfigError, match=r"^rope_theta: must be a finite number above 0, got nan"):
        OuroConfig.from_file(tmp_path)
