"""What replays are measured against: an Ouro core as plain eager torch modules.

Keys lie contiguous, so no pages are gathered, which favours this side.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from wavegraph.bench.shape import Shape


class Rms(nn.Module):
    """RMS norm, statistics in float32."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """``x [..., H]`` -> the same shape."""
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * self.weight


class Layer(nn.Module):
    """One layer, with fused projections and its cache ``[slots, heads, context, d]``."""

    def __init__(self, shape: Shape, weights: dict[str, Tensor], prefix: str, slots: int) -> None:
        super().__init__()
        self.shape = shape
        self.qkv = _linear(*(weights[f"{prefix}self_attn.{part}_proj.weight"] for part in "qkv"))
        self.o = _linear(weights[f"{prefix}self_attn.o_proj.weight"])
        self.gate_up = _linear(*(weights[f"{prefix}mlp.{part}_proj.weight"] for part in ("gate", "up")))
        self.down = _linear(weights[f"{prefix}mlp.down_proj.weight"])
        names = ("input_layernorm", "input_layernorm_2", "post_attention_layernorm", "post_attention_layernorm_2")
        self.norms = nn.ModuleList(Rms(weights[f"{prefix}{name}.weight"]) for name in names)
        size = (slots, shape.heads, shape.context, shape.head_dim)
        self.keys, self.values = (torch.randn(size).to(shape.torch_dtype) for _ in range(2))

    def forward(self, x: Tensor, where: Tensor, mask: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """``x [slots, chunk, H]`` at positions ``where [chunk]`` -> the same shape."""
        h = self.qkv(self.norms[0](x))
        q, k, v = h.unflatten(-1, (3, self.shape.heads, self.shape.head_dim)).permute(2, 0, 3, 1, 4)
        self.keys[:, :, where], self.values[:, :, where] = _rotate(k, cos, sin), v
        h = functional.scaled_dot_product_attention(_rotate(q, cos, sin), self.keys, self.values, attn_mask=mask)
        x = x + self.norms[1](self.o(h.transpose(1, 2).flatten(2)))
        gate, up = self.gate_up(self.norms[2](x)).chunk(2, -1)
        out: Tensor = x + self.norms[3](self.down(functional.silu(gate) * up))
        return out


class EagerCore(nn.Module):
    """One pass of the layers over ``rows`` rows: chunks that end at the shape's context, each of its own request."""

    def __init__(self, shape: Shape, weights: dict[str, Tensor], cos: Tensor, sin: Tensor, rows: int) -> None:
        super().__init__()
        count = min(rows, shape.chunk)
        slots = rows // count
        prefixes = [f"model.layers.{index}." for index in range(shape.layers)]
        self.layers = nn.ModuleList(Layer(shape, weights, prefix, slots) for prefix in prefixes)
        self.norm = Rms(weights["model.norm.weight"])
        self.where = torch.arange(shape.context - count, shape.context)
        self.mask = torch.arange(shape.context)[None] <= self.where[:, None]
        self.cos, self.sin = cos[self.where], sin[self.where]
        self.x = torch.randn(slots, count, shape.hidden).to(shape.torch_dtype)

    @torch.no_grad()
    def forward(self) -> Tensor:
        """The pass; the cache's last positions are written."""
        x = self.x
        for layer in self.layers:
            x = layer(x, self.where, self.mask, self.cos, self.sin)
        normed: Tensor = self.norm(x)
        return normed


def _linear(*weights: Tensor) -> nn.Linear:
    weight = torch.cat(weights)
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    return linear


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat((-high, low), -1) * sin
