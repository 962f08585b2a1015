"""Memory that the Triton operators need beside a step's static tensors, as views of ``StepIO.scratch``."""

from dataclasses import dataclass

import torch
from torch import Tensor

from wavegraph.errors import CaptureError
from wavegraph.model.io import StepIO

TILE_FIELDS = 5
_ALIGNMENT = 64  # words of 4 bytes: every view starts at a multiple of 256 bytes


@dataclass(frozen=True, slots=True)
class Splits:
    """How attention cuts a prefix: into at most ``count`` parts of ``length`` positions, whatever the batch."""

    length: int
    count: int

    @classmethod
    def of(cls, capacity: int, shortest: int, most: int, block: int) -> "Splits":
        """Parts for prefixes of up to ``capacity`` positions: multiples of ``block``, not below ``shortest``."""
        length = max(shortest, -(-capacity // most))
        length = -(-length // block) * block
        return cls(length, -(-capacity // length))


@dataclass(frozen=True, slots=True)
class WorkList:
    """Attention's work list, as `wavegraph.model.ops.triton.kernels.steps` writes it. All int32.

    For S spans and at most T tiles: ``row_ends, tile_ends [S]``, ``tiles [T, 5]``, ``item_ends [T]``,
    ``items [T * splits, 2]``, and ``live [2]``: how many items and tiles count.
    """

    row_ends: Tensor
    tile_ends: Tensor
    tiles: Tensor
    item_ends: Tensor
    items: Tensor
    live: Tensor


def most_tiles(rows: int, spans: int, tile_rows: int) -> int:
    """The most tiles that ``rows`` rows in at most ``spans`` spans make: each span may leave one cut short."""
    return min(rows, spans + rows // tile_rows)


def scratch_words(io: StepIO, splits: Splits, heads: int, head_dim: int, tile_rows: int) -> int:
    """How many words of int32 `work_list` and `partials` are views of."""
    return _padded(*_list_sizes(io, splits, tile_rows), *_partial_sizes(io, splits, heads, head_dim))


def work_list(io: StepIO, splits: Splits, tile_rows: int) -> WorkList:
    """The first part of ``io.scratch``. Raises `CaptureError` if it is too small."""
    return WorkList(*_cut(io.scratch, 0, *_list_sizes(io, splits, tile_rows)))


def partials(io: StepIO, splits: Splits, heads: int, head_dim: int, tile_rows: int) -> tuple[Tensor, Tensor]:
    """The rest: results of splits ``[B, splits, heads, d]`` and their logarithms ``[B, splits, heads]``, flat float32.

    Both are empty if a prefix is never cut. Raises `CaptureError` if the scratch is too small.
    """
    start = _padded(*_list_sizes(io, splits, tile_rows))
    partial, lse = _cut(io.scratch, start, *_partial_sizes(io, splits, heads, head_dim))
    return partial.view(torch.float32), lse.view(torch.float32)


def _list_sizes(io: StepIO, splits: Splits, tile_rows: int) -> tuple[int, ...]:
    spans = io.span_slot.shape[0]
    tiles = most_tiles(io.row_slot.shape[0], spans, tile_rows)
    return spans, spans, tiles * TILE_FIELDS, tiles, tiles * splits.count * 2, 2


def _partial_sizes(io: StepIO, splits: Splits, heads: int, head_dim: int) -> tuple[int, ...]:
    results = io.row_slot.shape[0] * splits.count * heads if splits.count > 1 else 0
    return results * head_dim, results


def _padded(*sizes: int) -> int:
    return sum(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes)


def _cut(scratch: Tensor, start: int, *sizes: int) -> list[Tensor]:
    if scratch.numel() < start + _padded(*sizes):
        raise CaptureError(
            f"scratch: holds {scratch.numel()} words, but the Triton operators need {start + _padded(*sizes)}; "
            "allocate what scratch_size says"
        )
    places = [start + _padded(*sizes[:index]) for index in range(len(sizes))]
    return [scratch[place : place + size] for place, size in zip(places, sizes, strict=True)]
