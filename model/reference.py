"""An independent answer to compare with: a dense float64 forward pass in NumPy.

Written from the public description of Ouro (``modeling_ouro.py`` of ByteDance/Ouro-1.4B), and sharing no code
with the rest of this package, down to the reading of the checkpoint. Slow and simple on purpose: one
sequence, no pages, no batching. Depth is called ``step`` here, as in the public model.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Forward:
    """Everything a pass over ``T`` new tokens computes; ``S`` steps, ``L`` layers, all float64.

    ``hidden [S, T, H]`` is normed; ``logits [S, T, V]`` of every step; ``gate_logits, lam, pdf, cdf [S, T]``
    the gate before and after the sigmoid and the exit distribution; ``k, v [S * L, kv_heads, past + T, d]``
    the whole cache, slot = step * L + layer, keys after RoPE.
    """

    hidden: Array
    logits: Array
    gate_logits: Array
    lam: Array
    pdf: Array
    cdf: Array
    k: Array
    v: Array


@dataclass(frozen=True, slots=True)
class Generation:
    """A greedy continuation: its tokens, the lead of each over the second best logit, and its exit step."""

    tokens: list[int] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    exit_steps: list[int] = field(default_factory=list)


def exit_steps(cdf: Array, threshold: float) -> NDArray[np.int64]:
    """First step whose ``cdf [S, T]`` reaches the threshold, else the last -> ``[T]``, 0-based."""
    reached = cdf >= threshold
    reached[-1] = True
    first: NDArray[np.int64] = np.argmax(reached, axis=0)
    return first


class ReferenceModel:
    """Ouro in float64. ``config`` has the keys of ``config.json``, ``tensors`` the public names."""

    def __init__(self, config: Mapping[str, Any], tensors: Mapping[str, NDArray[Any]]) -> None:
        self.config = config
        self.steps: int = config["total_ut_steps"]
        self.layers: int = config["num_hidden_layers"]
        self._tensors = {name: np.asarray(tensor, dtype=np.float64) for name, tensor in tensors.items()}
        if config["tie_word_embeddings"]:
            self._tensors["lm_head.weight"] = self._tensors["model.embed_tokens.weight"]

    @classmethod
    def from_folder(cls, folder: str | Path) -> "ReferenceModel":
        """Read a checkpoint folder: all its safetensors files, of dtype F32, BF16 or F16."""
        tensors: dict[str, NDArray[Any]] = {}
        for file in sorted(Path(folder).glob("*.safetensors")):
            tensors.update(_read_safetensors(file))
        return cls(json.loads((Path(folder) / "config.json").read_text()), tensors)

    def forward(self, token_ids: Sequence[int], past: Forward | None = None) -> Forward:
        """Run ``token_ids [T]`` through all steps, after the tokens whose cache is in ``past``."""
        x = self._tensors["model.embed_tokens.weight"][list(token_ids)]
        states, keys, values = [], [], []
        for step in range(self.steps):
            for layer in range(self.layers):
                slot = step * self.layers + layer
                before = (past.k[slot], past.v[slot]) if past else None
                x, k, v = self._layer(layer, x, before)
                keys.append(k)
                values.append(v)
            x = self._norm(x, "model.norm.weight")
            states.append(x)
        hidden = np.stack(states)
        gate = hidden @ self._tensors["model.early_exit_gate.weight"][0] + self._tensors["model.early_exit_gate.bias"]
        lam = 1 / (1 + np.exp(-gate))
        # Chance to have stayed through all steps before this one; the last step takes whatever mass is left.
        stayed = np.cumprod(np.vstack([np.ones_like(lam[:1]), 1 - lam[:-1]]), axis=0)
        pdf = np.vstack([lam[:-1] * stayed[:-1], stayed[-1:]])
        logits = hidden @ self._tensors["lm_head.weight"].T
        return Forward(hidden, logits, gate, lam, pdf, np.cumsum(pdf, axis=0), np.stack(keys), np.stack(values))

    def generate(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        *,
        threshold: float | None = None,
        exit_at_step: int | None = None,
        stop_token_ids: Sequence[int] = (),
    ) -> Generation:
        """Greedy tokens after ``prompt``. All steps run and fill their planes, wherever a token exits.

        A token's logits are those of ``exit_at_step`` if that is one of the steps (0-based), else of the
        first step whose exit mass reaches ``threshold`` if given, else of the last. A stop token is kept.
        """
        out = Generation()
        state = self.forward(prompt)
        for _ in range(max_tokens):
            step = self.steps - 1
            if exit_at_step is not None and 0 <= exit_at_step < self.steps:
                step = exit_at_step
            elif threshold is not None:
                step = int(exit_steps(state.cdf, threshold)[-1])
            logits = state.logits[step, -1]
            second, first = np.sort(logits)[-2:]
            out.tokens.append(int(np.argmax(logits)))
            out.margins.append(float(first - second))
            out.exit_steps.append(step)
            if out.tokens[-1] in stop_token_ids:
                break
            state = self.forward(out.tokens[-1:], past=state)
        return out

    def _layer(self, layer: int, x: Array, before: tuple[Array, Array] | None) -> tuple[Array, Array, Array]:
        prefix = f"model.layers.{layer}."
        normed = self._norm(x, prefix + "input_layernorm.weight")
        attended, k, v = self._attention(prefix + "self_attn.", normed, before)
        x = x + self._norm(attended, prefix + "input_layernorm_2.weight")
        normed = self._norm(x, prefix + "post_attention_layernorm.weight")
        gate, up = (self._linear(normed, f"{prefix}mlp.{name}_proj.weight") for name in ("gate", "up"))
        mlp = self._linear(gate / (1 + np.exp(-gate)) * up, prefix + "mlp.down_proj.weight")
        return x + self._norm(mlp, prefix + "post_attention_layernorm_2.weight"), k, v

    def _attention(self, prefix: str, x: Array, before: tuple[Array, Array] | None) -> tuple[Array, Array, Array]:
        """Causal attention of ``x [T, H]`` over cache and itself -> output ``[T, H]``, whole k and v."""
        head_dim = self.config["head_dim"]
        start = before[0].shape[1] if before else 0
        q, k, v = (
            self._linear(x, f"{prefix}{name}_proj.weight").reshape(len(x), -1, head_dim).transpose(1, 0, 2)
            for name in ("q", "k", "v")
        )
        q, k = self._rotate(q, start), self._rotate(k, start)
        if before:
            k, v = np.concatenate([before[0], k], axis=1), np.concatenate([before[1], v], axis=1)
        group = self.config["num_attention_heads"] // self.config["num_key_value_heads"]
        scores = q @ np.repeat(k, group, axis=0).transpose(0, 2, 1) / math.sqrt(head_dim)
        future = np.arange(k.shape[1]) > start + np.arange(len(x))[:, None]
        scores = np.where(future, -np.inf, scores)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        heads = weights @ np.repeat(v, group, axis=0)
        return self._linear(heads.transpose(1, 0, 2).reshape(len(x), -1), prefix + "o_proj.weight"), k, v

    def _rotate(self, heads: Array, start: int) -> Array:
        """Rotary embedding of ``heads [n, T, d]`` at positions ``start..``: pairs (i, i + d/2)."""
        half = heads.shape[-1] // 2
        positions = np.arange(start, start + heads.shape[1])
        angles = positions[:, None] * self.config["rope_theta"] ** (-np.arange(half) / half)
        cos, sin = np.cos(angles), np.sin(angles)
        low, high = heads[..., :half], heads[..., half:]
        return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)

    def _norm(self, x: Array, name: str) -> Array:
        scale = np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + self.config["rms_norm_eps"])
        out: Array = x / scale * self._tensors[name]
        return out

    def _linear(self, x: Array, name: str) -> Array:
        out: Array = x @ self._tensors[name].T
        return out


def _read_safetensors(file: Path) -> dict[str, NDArray[Any]]:
    """All tensors of one file. bfloat16, which NumPy lacks, is the upper half of a float32."""
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    tensors: dict[str, NDArray[Any]] = {}
    for name, entry in json.loads(content[8 : 8 + length]).items():
        if name == "__metadata__":
            continue
        start, stop = (8 + length + offset for offset in entry["data_offsets"])
        raw = content[start:stop]
        if entry["dtype"] == "BF16":
            flat: NDArray[Any] = (np.frombuffer(raw, "<u2").astype("<u4") << 16).view("<f4")
        else:
            flat = np.frombuffer(raw, {"F32": "<f4", "F16": "<f2"}[entry["dtype"]])
        tensors[name] = flat.reshape(entry["shape"])
    return tensors
