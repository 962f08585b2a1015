"""Static tensors for single operator calls, filled so that a row's inputs depend on what the row is alone."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from wavegraph.model.io import Pools, StepIO
from wavegraph.model.sampling import PARAMS_WIDTH

NAN = float("nan")

# What the kernels of each instruction set need, as /proc/cpuinfo calls it.
_NEEDS = {
    "portable": set(),
    "avx2": {"avx2", "fma"},
    "avx512": {"avx512f", "avx512bw", "avx512dq", "avx512vl"},
    "avx512_bf16": {"avx512f", "avx512_bf16"},
    "amx": {"amx_tile", "amx_bf16", "avx512_bf16"},
}


def _cpu_flags() -> set[str]:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("flags"):
            return set(line.split())
    return set()


ISAS = tuple(name for name, needs in _NEEDS.items() if needs <= _cpu_flags())
"""Instruction sets of this CPU, the best last."""

CANARY = 12345.0
CODA = ("slot", "pos", "depth", "action")

Row = tuple[int, int, int]
"""Slot, depth, position."""


@dataclass(frozen=True)
class Shape:
    """Sizes of the tensors of one step."""

    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    hidden: int = 64
    vocab: int = 100
    slots: int = 3
    length: int = 200
    page_size: int = 5
    depths: int = 2
    layers: int = 2
    rows: int = 72

    @property
    def blocks(self) -> int:
        """Pages of a slot."""
        return -(-self.length // self.page_size)

    @property
    def pages(self) -> int:
        """Pages that requests can own; the next one is scratch."""
        return self.slots * self.blocks + 3


def seeded(*key: int) -> torch.Generator:
    """A generator for one thing's values, named by small numbers."""
    seed = 0
    for part in key:
        seed = seed * 1009 + part + 1
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, key: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Gaussian values that depend on ``key`` alone."""
    return torch.randn(shape, generator=seeded(*key)).to(dtype)


class Step:
    """io and pools of one engine; all pages hold NaN, each slot's pages lie shuffled in the pool."""

    def __init__(self, shape: Shape, dtype: torch.dtype, layout: int = 0) -> None:
        self.shape, self.dtype = shape, dtype
        plane = (shape.depths, shape.layers, shape.page_size, shape.kv_heads, shape.head_dim)
        self.pools = Pools(
            k=torch.full((shape.pages + 1, *plane), NAN, dtype=dtype),
            v=torch.full((shape.pages + 1, *plane), NAN, dtype=dtype),
            hidden=torch.full((shape.pages + 1, shape.page_size, shape.hidden), NAN, dtype=dtype),
            gate=torch.full((shape.pages + 1, shape.page_size, shape.depths), NAN),
        )

        def ints(*size: int, fill: int = 0) -> Tensor:
            return torch.full(size, fill, dtype=torch.int32)

        rows, spans, slots = shape.rows, shape.rows, shape.slots
        self.io = StepIO(
            header=ints(8),
            span_slot=ints(spans, fill=slots),
            span_start=ints(spans),
            span_count=ints(spans),
            span_depth=ints(spans),
            token_slot=ints(rows, fill=slots),
            token_pos=ints(rows),
            token_id=ints(rows),
            page_slot=ints(rows, fill=slots),
            page_index=ints(rows),
            page_id=ints(rows, fill=shape.pages),
            param_slot=ints(2, fill=slots),
            param_rows=ints(2, PARAMS_WIDTH),
            **{f"coda_{field}": ints(rows, fill=slots if field == "slot" else 0) for field in CODA},
            token_table=ints(slots + 1, shape.length + 1),
            page_table=ints(slots + 1, shape.blocks, fill=shape.pages),
            params=ints(slots + 1, PARAMS_WIDTH),
            row_slot=ints(rows),
            row_pos=ints(rows),
            row_depth=ints(rows),
            row_page=ints(rows),
            row_offset=ints(rows),
            logits=torch.full((rows, shape.vocab), CANARY, dtype=dtype),
            coda_left=ints(rows),
            coda_token=ints(rows, fill=-7),
            **{field: torch.empty(0) for field in ("coda_logprob", "coda_rank", "top_ids", "top_logprobs")},
        )
        order = torch.randperm(shape.pages, generator=seeded(layout))[: slots * shape.blocks]
        self.io.page_table[:slots] = order.view(slots, shape.blocks)

    def place(self, slot: int, pos: int) -> tuple[int, int]:
        """Page and offset of a position."""
        return int(self.io.page_table[slot, pos // self.shape.page_size]), pos % self.shape.page_size

    def set_rows(self, rows: Sequence[Row], bucket: int) -> None:
        """Write the row fields as `Ops.prepare` would."""
        padding = (self.shape.slots, 0, 0)
        for index, (slot, depth, pos) in enumerate([*rows, *[padding] * (bucket - len(rows))]):
            page, offset = (self.shape.pages, 0) if slot == self.shape.slots else self.place(slot, pos)
            for name, value in (("slot", slot), ("depth", depth), ("pos", pos), ("page", page), ("offset", offset)):
                getattr(self.io, f"row_{name}")[index] = value

    def write_kv(self, rows: Sequence[Row], layer: int) -> None:
        """Fill the causal prefix, the row itself included, of every row; everything else stays NaN."""
        reach: dict[tuple[int, int], int] = {}
        for slot, depth, pos in rows:
            reach[slot, depth] = max(reach.get((slot, depth), 0), pos + 1)
        for (slot, depth), count in reach.items():
            k, v = kv_of(self.shape, self.dtype, slot, depth)
            for pos in range(count):
                page, offset = self.place(slot, pos)
                self.pools.k[page, depth, layer, offset] = k[pos]
                self.pools.v[page, depth, layer, offset] = v[pos]


def kv_of(shape: Shape, dtype: torch.dtype, slot: int, depth: int) -> tuple[Tensor, Tensor]:
    """K and V ``[length, kv_heads, head_dim]`` of one plane of a slot."""
    size = (shape.length, shape.kv_heads, shape.head_dim)
    return normal(*size, key=(1, slot, depth), dtype=dtype), normal(*size, key=(2, slot, depth), dtype=dtype)


def qkv_of(shape: Shape, dtype: torch.dtype, rows: Sequence[Row], bucket: int) -> Tensor:
    """``[bucket, (heads + 2 kv_heads) d]``; padding rows are NaN."""
    width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    qkv = torch.full((bucket, width), NAN, dtype=dtype)
    for index, row in enumerate(rows):
        qkv[index] = normal(width, key=(3, *row), dtype=dtype)
    return qkv


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equality of every bit, NaN and the sign of zero included."""
    kind = torch.int32 if a.element_size() == 4 else torch.int16
    return a.shape == b.shape and torch.equal(a.contiguous().view(kind), b.contiguous().view(kind))
