"""What a checkpoint's ``config.json`` says about the computation, validated field by field."""

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wavegraph.errors import CheckpointError, ConfigError

DTYPES = ("float32", "bfloat16", "float16")

_INT_MAX = 2**31 - 1  # the device tables are int32

_ONLY_VALUES: Mapping[str, object] = {
    "use_sliding_window": False,
    "attention_bias": False,
    "mlp_bias": False,
    "rope_interleaved": False,
    "rope_type": "default",
    "partial_rotary_factor": 1,
}
"""Optional keys whose other values mean a computation that this engine does not have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OuroConfig:
    """An Ouro model. Field names are those of the public ``config.json`` except for the last two.

    Every key that changes what is computed must be present: the public configuration class has defaults
    far from the published models (``head_dim`` falls back to hidden / heads), so a missing key would silently
    mean another model. ``head_dim * num_attention_heads`` may differ from ``hidden_size``.

    ``early_exit_threshold`` may be null (never leave early). ``eos_token_ids`` comes from ``eos_token_id``
    (an int, a list, or null for none); ``dtype`` from ``torch_dtype`` or ``dtype``, None if neither is given.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    total_ut_steps: int
    max_position_embeddings: int
    rope_theta: float
    rms_norm_eps: float
    tie_word_embeddings: bool
    early_exit_threshold: float | None
    eos_token_ids: tuple[int, ...]
    dtype: str | None

    @property
    def q_size(self) -> int:
        """Features of all query heads: ``num_attention_heads * head_dim``."""
        return self.num_attention_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Features of all key (or value) heads: ``num_key_value_heads * head_dim``."""
        return self.num_key_value_heads * self.head_dim

    @classmethod
    def from_file(cls, path: str | Path) -> "OuroConfig":
        """Read ``path``, a ``config.json`` or the folder that holds one.

        Raises `CheckpointError` if there is no such file or it is not a JSON object, `ConfigError` as
        `from_dict` does.
        """
        file = Path(path)
        if file.is_dir():
            file = file / "config.json"
        return cls.from_dict(read_json(file))

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> "OuroConfig":
        """Validate the keys of a ``config.json``. Raises `ConfigError` that names the key and its value.

        Unknown keys that the public model ignores are ignored; keys that would change the computation in a
        way this engine does not have (sliding window, RoPE scaling, quantisation, …) are refused.
        """
        _refuse_unsupported(raw)
        vocab_size = _integer(raw, "vocab_size")
        config = cls(
            vocab_size=vocab_size,
            hidden_size=_integer(raw, "hidden_size"),
            intermediate_size=_integer(raw, "intermediate_size"),
            num_hidden_layers=_integer(raw, "num_hidden_layers"),
            num_attention_heads=_integer(raw, "num_attention_heads"),
            num_key_value_heads=_integer(raw, "num_key_value_heads"),
            head_dim=_integer(raw, "head_dim"),
            total_ut_steps=_integer(raw, "total_ut_steps"),
            max_position_embeddings=_integer(raw, "max_position_embeddings"),
            rope_theta=_positive(raw, "rope_theta"),
            rms_norm_eps=_positive(raw, "rms_norm_eps"),
            tie_word_embeddings=_boolean(raw, "tie_word_embeddings"),
            early_exit_threshold=_threshold(raw),
            eos_token_ids=_eos_token_ids(raw, vocab_size),
            dtype=_dtype(raw),
        )
        _check_heads(config)
        _check_layer_types(raw.get("layer_types"), config.num_hidden_layers)
        return config


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in ``file``. Raises `CheckpointError` if it is missing, unreadable or something else.

    A key given twice is refused: which of the two counts is not defined.
    """
    try:
        text = file.read_bytes()
    except FileNotFoundError:
        raise CheckpointError(f"{file}: no such file; a checkpoint folder must hold one") from None
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read ({error.strerror})") from error
    return parse_json(text, file)


def parse_json(text: bytes, file: Path) -> dict[str, Any]:
    """The JSON object ``text``, which was found in ``file``. Raises `CheckpointError` as `read_json` does."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
            raise CheckpointError(f"{file}: the key {twice!r} is given twice; remove one of them")
        return found

    try:
        content = json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: is not JSON ({error}); copy the checkpoint again") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file}: must hold a JSON object, got {type(content).__name__}")
    return content


def _refuse_unsupported(raw: Mapping[str, Any]) -> None:
    if raw.get("model_type") != "ouro":
        raise ConfigError(f"model_type: must be 'ouro', got {raw.get('model_type')!r}; only Ouro models run here")
    if raw.get("hidden_act") != "silu":
        raise ConfigError(f"hidden_act: must be 'silu', got {raw.get('hidden_act')!r}; no other is supported")
    for key in (
        "rope_scaling",
        "rope_parameters",
        "sliding_window",
        "early_exit_step",
        "quantization_config",
    ):
        if raw.get(key) is not None:
            raise ConfigError(f"{key}: is not supported, got {raw[key]!r}; it must be null or absent")
    for key, only in _ONLY_VALUES.items():
        value = raw.get(key, only)
        if isinstance(value, bool) != isinstance(only, bool) or value != only:
            raise ConfigError(f"{key}: must be {json.dumps(only)} or absent, got {value!r}; no other is supported")


def _required(raw: Mapping[str, Any], key: str) -> Any:
    if key not in raw:
        raise ConfigError(f"{key}: is missing from the model's config; it has no safe default, so add it")
    return raw[key]


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _integer(raw: Mapping[str, Any], key: str) -> int:
    value = _required(raw, key)
    if not _is_int(value) or not 1 <= value <= _INT_MAX:
        raise ConfigError(f"{key}: must be an integer in 1..{_INT_MAX}, got {value!r}")
    return int(value)


def _positive(raw: Mapping[str, Any], key: str) -> float:
    value = _required(raw, key)
    if not (_is_int(value) or isinstance(value, float)) or not 0 < value < math.inf:
        raise ConfigError(f"{key}: must be a finite number above 0, got {value!r}")
    return float(value)


def _boolean(raw: Mapping[str, Any], key: str) -> bool:
    value = _required(raw, key)
    if not isinstance(value, bool):
        raise ConfigError(f"{key}: must be true or false, got {value!r}")
    return value


def _threshold(raw: Mapping[str, Any]) -> float | None:
    value = _required(raw, "early_exit_threshold")
    if value is None:
        return None
    if not (_is_int(value) or isinstance(value, float)) or not 0 <= value < math.inf:
        raise ConfigError(f"early_exit_threshold: must be null or a finite number from 0 up, got {value!r}")
    return float(value)


def _eos_token_ids(raw: Mapping[str, Any], vocab_size: int) -> tuple[int, ...]:
    value = _required(raw, "eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    for token in ids:
        if not _is_int(token) or not 0 <= token < vocab_size:
            raise ConfigError(f"eos_token_id: must be null or token ids below vocab_size ({vocab_size}), got {value!r}")
    return tuple(ids)


def _dtype(raw: Mapping[str, Any]) -> str | None:
    given = {key: raw[key] for key in ("torch_dtype", "dtype") if raw.get(key) is not None}
    for key, value in given.items():
        if value not in DTYPES:
            raise ConfigError(f"{key}: must be one of {', '.join(DTYPES)}, got {value!r}")
    values = list(given.values())
    if len(values) == 2 and values[0] != values[1]:
        raise ConfigError(f"dtype: is {values[1]!r} but torch_dtype is {values[0]!r}; remove one of them")
    return values[0] if values else None


def _check_heads(config: OuroConfig) -> None:
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if heads % kv_heads:
        raise ConfigError(f"num_key_value_heads: must divide num_attention_heads ({heads}), got {kv_heads}")
    if config.head_dim % 2:
        raise ConfigError(f"head_dim: must be even for rotary embeddings, got {config.head_dim}")


def _check_layer_types(layer_types: object, layers: int) -> None:
    if layer_types is None:
        return
    if not isinstance(layer_types, list) or len(layer_types) != layers:
        raise ConfigError(f"layer_types: must list one type for each of {layers} layers, got {layer_types!r}")
    for index, kind in enumerate(layer_types):
        if kind != "full_attention":
            raise ConfigError(f"layer_types: entry {index} must be 'full_attention', got {kind!r}")
