"""The shape that benchmarks run: options, and a random model of it."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from wavegraph.errors import ConfigError
from wavegraph.model.config import OuroConfig
from wavegraph.model.loading import check_dtype
from wavegraph.model.weights import random_weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of a model and of its work. ``context`` is the position after a chunk's last row."""

    hidden: int = 1024
    layers: int = 8
    heads: int = 8
    head_dim: int = 128
    inner: int = 2816
    vocab: int = 4096
    context: int = 256
    chunk: int = 16
    page_size: int = 16
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        check_dtype(self.dtype)
        if self.dtype == "auto":
            raise ConfigError("dtype: random weights have none of their own; name one")
        for name in ("hidden", "layers", "heads", "inner", "vocab", "context", "chunk", "page_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: must be at least 1, got {getattr(self, name)}")
        if self.context < self.chunk:
            raise ConfigError(f"context: {self.context} cannot end a chunk of {self.chunk}; lower the chunk")

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype itself."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    def config(self, *, depths: int = 1, max_len: int | None = None) -> OuroConfig:
        """A model of this shape with ``depths`` loops."""
        return OuroConfig.from_dict(self.config_dict(depths=depths, max_len=max_len))

    def config_dict(self, *, depths: int = 1, max_len: int | None = None) -> dict[str, Any]:
        """The same as a checkpoint's ``config.json`` has it."""
        return {
            "model_type": "ouro",
            "hidden_act": "silu",
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads,
            "head_dim": self.head_dim,
            "total_ut_steps": depths,
            "rope_theta": 1e6,
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": max_len or self.context,
            "tie_word_embeddings": True,
            "early_exit_threshold": 1.0,
            "eos_token_id": 0,
            "torch_dtype": self.dtype,
        }

    def weights(self, config: OuroConfig) -> dict[str, Tensor]:
        """Random weights by public names."""
        return dict(random_weights(config, 0, self.torch_dtype))
