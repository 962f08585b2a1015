"""A model in memory: weights fused and packed for one operator set, and the rotary tables."""

import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from wavegraph.errors import CheckpointError, ConfigError
from wavegraph.model.config import OuroConfig
from wavegraph.model.ops.base import Ops

CPU = torch.device("cpu")

_LAYER_NORMS = (
    "input_layernorm",
    "input_layernorm_2",
    "post_attention_layernorm",
    "post_attention_layernorm_2",
)

Fill = Callable[[str, Tensor], None]
"""Writes the checkpoint tensor of a public name into a given view of a fused buffer, converting its dtype."""


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One shared layer. Linear weights are as packed by the operator set; the shapes are those before.

    ``qkv [(heads + 2 kv_heads) d, H]``, ``o [H, heads d]``, ``gate_up [2 I, H]``, ``down [H, I]``; the four
    norms ``[H]`` in their order of use: before and after attention, before and after the MLP.
    """

    attn_norm: Tensor
    qkv: Tensor
    o: Tensor
    attn_out_norm: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor
    mlp_out_norm: Tensor


@dataclass(frozen=True, slots=True)
class OuroWeights:
    """All weights, in the model's dtype.

    ``embedding [V, H]``; ``norm [H]`` after every pass; the exit gate ``gate_weight [H]``, ``gate_bias [1]``;
    ``lm_head [V, H]`` as packed by the operator set.
    """

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    gate_weight: Tensor
    gate_bias: Tensor
    lm_head: Tensor


@dataclass(frozen=True, slots=True)
class RopeTables:
    """``cos, sin [max_len, head_dim]``: angles and functions in float32, then cast, as the reference does."""

    cos: Tensor
    sin: Tensor

    @classmethod
    def build(cls, config: OuroConfig, max_len: int, dtype: torch.dtype, device: torch.device = CPU) -> "RopeTables":
        """Tables for positions ``0..max_len - 1``, made on the CPU; a row's halves are equal (pairs: i, i + d/2)."""
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        inv_freq = 1.0 / config.rope_theta**exponents
        angles = torch.outer(torch.arange(max_len, dtype=torch.float32), inv_freq)
        cos, sin = (table.to(dtype).repeat(1, 2).to(device) for table in (angles.cos(), angles.sin()))
        return cls(cos, sin)


@dataclass(frozen=True, slots=True)
class Model:
    """What CORE and CODA take. ``dtype`` is that of all weights; ``max_model_len`` positions have angles."""

    config: OuroConfig
    weights: OuroWeights
    rope: RopeTables
    ops: Ops
    dtype: torch.dtype
    max_model_len: int

    def load_(self, tensors: Mapping[str, Tensor]) -> None:
        """Write new weights, keyed by public names, into the memory of the present ones.

        Every tensor of the model must be given, in any floating dtype. Besides the model, one fused buffer and one
        packed layer (or head and embedding) are held. Raises `CheckpointError`, writing nothing, for a missing or
        unexpected name, a wrong shape, or a dtype that is not floating.
        """
        check_new_weights(self.config, tensors)
        with torch.no_grad():
            device = self.weights.embedding.device
            assembler = _Assembler(self.config, _fill_from(tensors), self.ops, self.dtype, device)
            for index, layer in enumerate(self.weights.layers):
                _copy_fields(layer, assembler.layer(index))
            _copy_fields(self.weights, assembler.outer())


def tensor_shapes(config: OuroConfig) -> dict[str, tuple[int, ...]]:
    """Public name and shape of every tensor of a checkpoint. Tied embeddings have no ``lm_head.weight``."""
    hidden, inner = config.hidden_size, config.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        shapes[prefix + "self_attn.q_proj.weight"] = (config.q_size, hidden)
        shapes[prefix + "self_attn.k_proj.weight"] = (config.kv_size, hidden)
        shapes[prefix + "self_attn.v_proj.weight"] = (config.kv_size, hidden)
        shapes[prefix + "self_attn.o_proj.weight"] = (hidden, config.q_size)
        shapes[prefix + "mlp.gate_proj.weight"] = (inner, hidden)
        shapes[prefix + "mlp.up_proj.weight"] = (inner, hidden)
        shapes[prefix + "mlp.down_proj.weight"] = (hidden, inner)
        for norm in _LAYER_NORMS:
            shapes[f"{prefix}{norm}.weight"] = (hidden,)
    shapes["model.norm.weight"] = (hidden,)
    shapes["model.early_exit_gate.weight"] = (1, hidden)
    shapes["model.early_exit_gate.bias"] = (1,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def check_max_model_len(config: OuroConfig, max_model_len: int | None) -> int:
    """``max_model_len``, or the config's limit for None. Raises `ConfigError` outside 1..that limit."""
    limit = config.max_position_embeddings
    length = limit if max_model_len is None else max_model_len
    if not 1 <= length <= limit:
        raise ConfigError(f"max_model_len: must be in 1..{limit} (max_position_embeddings), got {length}")
    return length


def build_model(
    config: OuroConfig,
    fill: Fill,
    *,
    ops: Ops,
    dtype: torch.dtype,
    max_model_len: int | None = None,
    device: torch.device = CPU,
) -> Model:
    """Fuse and pack a model on ``device`` whose tensors ``fill`` supplies, each asked for exactly once.

    The most memory held is the model and one fused buffer. Raises `ConfigError` for a bad ``max_model_len``,
    and whatever ``fill`` raises.
    """
    length = check_max_model_len(config, max_model_len)
    assembler = _Assembler(config, fill, ops, dtype, device)
    # The largest buffer goes first, while nothing else is held.
    outer = assembler.outer()
    weights = replace(outer, layers=tuple(assembler.layer(index) for index in range(config.num_hidden_layers)))
    return Model(config, weights, RopeTables.build(config, length, dtype, device), ops, dtype, length)


class _Assembler:
    """Fuses tensors and packs them. One buffer serves all linears of operator sets that pack into a copy."""

    def __init__(self, config: OuroConfig, fill: Fill, ops: Ops, dtype: torch.dtype, device: torch.device) -> None:
        self._shapes = tensor_shapes(config)
        self._tied = config.tie_word_embeddings
        self._fill = fill
        self._ops = ops
        self._dtype = dtype
        self._device = device
        self._spare = self._empty(0)

    def read(self, name: str) -> Tensor:
        """One tensor in memory of its own."""
        tensor = self._empty(*self._shapes[name])
        self._fill(name, tensor)
        return tensor

    def outer(self) -> OuroWeights:
        """All weights but those of the layers. With tied embeddings the packed head may be the embedding itself."""
        if self._tied:
            embedding = self.read("model.embed_tokens.weight")
            lm_head = self._ops.pack_linear(embedding)
        else:
            lm_head = self._ops.pack_linear(self.read("lm_head.weight"))
            embedding = self.read("model.embed_tokens.weight")
        return OuroWeights(
            embedding=embedding,
            layers=(),
            norm=self.read("model.norm.weight"),
            gate_weight=self.read("model.early_exit_gate.weight")[0],
            gate_bias=self.read("model.early_exit_gate.bias"),
            lm_head=lm_head,
        )

    def layer(self, index: int) -> LayerWeights:
        """One layer, its linears fused and packed."""
        layer = f"model.layers.{index}."
        attn, mlp = layer + "self_attn.", layer + "mlp."
        linear, gate_up = self._ops.pack_linear, self._ops.pack_gate_up
        return LayerWeights(
            attn_norm=self.read(layer + "input_layernorm.weight"),
            qkv=self._packed(linear, attn + "q_proj.weight", attn + "k_proj.weight", attn + "v_proj.weight"),
            o=self._packed(linear, attn + "o_proj.weight"),
            attn_out_norm=self.read(layer + "input_layernorm_2.weight"),
            mlp_norm=self.read(layer + "post_attention_layernorm.weight"),
            gate_up=self._packed(gate_up, mlp + "gate_proj.weight", mlp + "up_proj.weight"),
            down=self._packed(linear, mlp + "down_proj.weight"),
            mlp_out_norm=self.read(layer + "post_attention_layernorm_2.weight"),
        )

    def _packed(self, pack: Callable[[Tensor], Tensor], *names: str) -> Tensor:
        """The named matrices one below the other, packed."""
        rows = [self._shapes[name][0] for name in names]
        columns = self._shapes[names[0]][1]
        count = sum(rows) * columns
        if self._spare.numel() < count:
            self._spare = self._empty(count)
        fused = self._spare[:count].view(-1, columns)
        for name, part in zip(names, torch.split(fused, rows), strict=True):
            self._fill(name, part)
        packed = pack(fused)
        if packed.untyped_storage().data_ptr() == self._spare.untyped_storage().data_ptr():
            self._spare = self._empty(0)  # it is the weight itself now
        return packed

    def _empty(self, *size: int) -> Tensor:
        return torch.empty(size, dtype=self._dtype, device=self._device)


def model_from_tensors(
    config: OuroConfig,
    tensors: Mapping[str, Tensor],
    *,
    ops: Ops,
    dtype: torch.dtype,
    max_model_len: int | None = None,
    device: torch.device = CPU,
) -> Model:
    """A model on ``device`` from tensors in memory, keyed by public names.

    Raises `CheckpointError` for a missing or unexpected name, or a wrong shape.
    """
    check_tensors(config, {name: tuple(tensor.shape) for name, tensor in tensors.items()}, "tensors")
    fill = _fill_from(tensors)
    return build_model(config, fill, ops=ops, dtype=dtype, max_model_len=max_model_len, device=device)


def _fill_from(tensors: Mapping[str, Tensor]) -> Fill:
    def fill(name: str, out: Tensor) -> None:
        out.copy_(tensors[name])

    return fill


def check_new_weights(config: OuroConfig, tensors: Mapping[str, Tensor]) -> None:
    """Raise `CheckpointError` as `Model.load_` would, for names, shapes and dtypes; writes nothing."""
    check_tensors(config, {name: tuple(tensor.shape) for name, tensor in tensors.items()}, "weights")
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise CheckpointError(f"weights: {name} is {tensor.dtype}; give floating point values")


def _copy_fields(target: LayerWeights | OuroWeights, source: LayerWeights | OuroWeights) -> None:
    """Copy each tensor of ``source`` into that of ``target``; other fields are left alone."""
    for entry in fields(target):
        tensor = getattr(target, entry.name)
        if isinstance(tensor, Tensor):
            tensor.copy_(getattr(source, entry.name))


def check_tensors(config: OuroConfig, found: Mapping[str, tuple[int, ...]], where: object) -> None:
    """Raise `CheckpointError` for the first name or shape that is not what the config asks for."""
    expected = tensor_shapes(config)
    missing = [name for name in expected if name not in found]
    if missing:
        raise CheckpointError(
            f"{where}: {len(missing)} tensor(s) that the config asks for are missing, first {missing[0]}; "
            "check that config and weights belong together"
        )
    unexpected = sorted(found.keys() - expected.keys())
    if unexpected:
        raise CheckpointError(
            f"{where}: {len(unexpected)} tensor(s) have no place in this model, first {unexpected[0]}; "
            "check that config and weights belong together"
        )
    for name, shape in expected.items():
        if found[name] != shape:
            raise CheckpointError(
                f"{where}: {name} has shape {list(found[name])}, but the config asks for {list(shape)}"
            )


def random_weights(
    config: OuroConfig, seed: int, dtype: torch.dtype = torch.float32, *, gate_scale: float = 1.0
) -> Iterator[tuple[str, Tensor]]:
    """Name and tensor of a random checkpoint, for tests and benchmarks.

    Matrices have variance 1 / fan-in, embeddings 1, norm weights lie around 1; exit gate logits have a
    standard deviation of about ``gate_scale``. Each tensor depends on ``seed`` and its name alone, and comes
    from raw PCG64 bits by single float32 operations: the values are the same with every NumPy, torch and CPU.
    """
    for name, shape in tensor_shapes(config).items():
        noise = _unit_noise(seed, name, shape)
        if name.endswith("norm.weight") or "layernorm" in name:
            values = np.float32(1.0) + np.float32(0.1) * noise
        elif name == "model.embed_tokens.weight":
            values = noise
        elif name == "model.early_exit_gate.bias":
            values = np.zeros(shape, dtype=np.float32)
        else:
            scale = gate_scale if name == "model.early_exit_gate.weight" else 1.0
            values = np.float32(scale * shape[1] ** -0.5) * noise
        yield name, torch.from_numpy(values).to(dtype)


def _unit_noise(seed: int, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Uniform float32 noise of mean 0 and variance 1. Two 24-bit values are taken from each 64-bit word."""
    count = int(np.prod(shape))
    bits = np.random.PCG64(np.random.SeedSequence([seed, zlib.crc32(name.encode())]))
    words = bits.random_raw((count + 1) // 2).astype("<u8", copy=False).view("<u4")[:count]
    centred = (words >> 8).astype(np.float32) - np.float32(2**23 - 0.5)
    return (centred * np.float32(3**0.5 * 2.0**-23)).reshape(shape)
