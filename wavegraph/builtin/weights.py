"""Seeded random weights of the built-in model, the same bits on every machine.

NumPy promises stable streams for its bit generators but not for its distributions, so uniform values are
made here from the raw bits, by steps that are exact in float32 but for one final multiplication.
"""

import hashlib
import json
import math

import numpy as np
from numpy.typing import NDArray

SEED = 2510_25741

WEIGHTS_SHA256 = "17e178032a2795c9d18bd41c825c43d182a98bbf2e0194371913fe0c26285f53"
"""`digest` of what `make_weights` returns for the packaged ``config.json``; a test compares them."""

# Chosen by measurement so that random weights behave like a trained model where it matters: each loop keeps
# about three quarters of its input (no collapse over four loops), attention prefers some positions, two best
# logits are seldom close, and the gate leaves at every depth for a threshold of one half.
QUERY_KEY_GAIN = 1.5
BRANCH_NORM = 0.35
LOGIT_GAIN = 3.0
GATE_GAIN = 1.5
GATE_BIAS = -0.5
NORM_JITTER = 0.1

Weights = dict[str, NDArray[np.float32]]


def make_weights(config: bytes) -> Weights:
    """All tensors of an Ouro checkpoint with the sizes in ``config`` (a ``config.json``), float32.

    Names and shapes are those of the public checkpoints: matrices ``[out, in]``, norms ``[hidden]``,
    ``model.early_exit_gate.weight [1, hidden]`` and ``.bias [1]``.
    """
    sizes = json.loads(config)
    hidden, inner, vocab = sizes["hidden_size"], sizes["intermediate_size"], sizes["vocab_size"]
    query = sizes["num_attention_heads"] * sizes["head_dim"]
    key = sizes["num_key_value_heads"] * sizes["head_dim"]
    stream = np.random.PCG64(SEED)

    def matrix(rows: int, columns: int, gain: float = 1.0) -> NDArray[np.float32]:
        return _uniform(stream, (rows, columns), gain / math.sqrt(columns))

    def norm(mean: float = 1.0) -> NDArray[np.float32]:
        return np.float32(mean) * (np.float32(1) + _uniform(stream, (hidden,), NORM_JITTER))

    weights: Weights = {"model.embed_tokens.weight": _uniform(stream, (vocab, hidden), 1.0)}
    for index in range(sizes["num_hidden_layers"]):
        weights |= {
            f"model.layers.{index}.{name}.weight": tensor
            for name, tensor in (
                ("input_layernorm", norm()),
                ("self_attn.q_proj", matrix(query, hidden, QUERY_KEY_GAIN)),
                ("self_attn.k_proj", matrix(key, hidden, QUERY_KEY_GAIN)),
                ("self_attn.v_proj", matrix(key, hidden)),
                ("self_attn.o_proj", matrix(hidden, query)),
                ("input_layernorm_2", norm(BRANCH_NORM)),
                ("post_attention_layernorm", norm()),
                ("mlp.gate_proj", matrix(inner, hidden)),
                ("mlp.up_proj", matrix(inner, hidden)),
                ("mlp.down_proj", matrix(hidden, inner)),
                ("post_attention_layernorm_2", norm(BRANCH_NORM)),
            )
        }
    weights["model.norm.weight"] = norm()
    weights["model.early_exit_gate.weight"] = matrix(1, hidden, GATE_GAIN)
    weights["model.early_exit_gate.bias"] = np.array([GATE_BIAS], dtype=np.float32)
    weights["lm_head.weight"] = matrix(vocab, hidden, LOGIT_GAIN)
    return weights


def digest(weights: Weights) -> str:
    """SHA-256 of names, shapes and little-endian values, in order of name."""
    sha = hashlib.sha256()
    for name, tensor in sorted(weights.items()):
        sha.update(f"{name}{tensor.shape}".encode())
        sha.update(tensor.astype("<f4").tobytes())
    return sha.hexdigest()


def _uniform(stream: np.random.PCG64, shape: tuple[int, ...], std: float) -> NDArray[np.float32]:
    """Values of mean 0 and standard deviation ``std``, from the top 24 bits of each raw number."""
    bits = stream.random_raw(math.prod(shape)) >> np.uint64(40)
    centred = bits.astype(np.float32) - np.float32(2**23 - 0.5)
    return (centred * np.float32(std * math.sqrt(3) / 2**23)).reshape(shape)
