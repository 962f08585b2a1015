"""Attention against float64; a row's bits depend on the row alone; nothing that a mask excludes is seen."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from tests.model.cpu_step import Row, Shape, kv_of, qkv_of, same_bits
from tests.model.interpreted.launcher import make_launcher
from tests.model.interpreted.steps import Span, assert_close, assert_framed, framed, prepared, rows_of
from wavegraph.model.ops.triton.ops import TritonOps

# One tile cut short, two tiles, the first and the last position; prefixes of one split and of several.
SPANS: list[Span] = [(1, 120, 18, 0), (0, 0, 1, 1), (2, 62, 4, 1), (1, 199, 1, 1)]
BUCKET = 27


def reference(shape: Shape, dtype: torch.dtype, row: Row, qkv: Tensor) -> Tensor:
    slot, depth, pos = row
    k, v = (part[: pos + 1].double() for part in kv_of(shape, dtype, slot, depth))
    q = qkv[: shape.heads * shape.head_dim].double().view(shape.kv_heads, -1, shape.head_dim)
    scores = torch.einsum("kgd,ckd->kgc", q, k) * shape.head_dim**-0.5
    return torch.einsum("kgc,ckd->kgd", scores.softmax(dim=-1), v).flatten()


def attend(ops: TritonOps, shape: Shape, dtype: torch.dtype, spans: Sequence[Span], bucket: int) -> tuple[Tensor, ...]:
    """Results of the live rows, and what they should be. Free pages, tails and scratch are NaN."""
    step = prepared(ops, shape, dtype, spans, bucket)
    rows = rows_of(spans)
    step.write_kv(rows, layer=1)
    qkv = qkv_of(shape, dtype, rows, bucket)
    out = framed(bucket, shape.heads * shape.head_dim, dtype)
    ops.attention(out, qkv, step.io, step.pools, 1, bucket)
    assert_framed(out, bucket)
    return out[: len(rows)], torch.stack([reference(shape, dtype, row, qkv[i]) for i, row in enumerate(rows)])


@pytest.mark.parametrize(
    ("head_dim", "group", "page_size"), [(16, 1, 16), (48, 3, 32), (64, 1, 64), (112, 2, 16), (128, 1, 5), (256, 2, 16)]
)
def test_attention(ops: TritonOps, dtype: torch.dtype, head_dim: int, group: int, page_size: int) -> None:
    shape = Shape(heads=group, kv_heads=1, head_dim=head_dim, page_size=page_size)
    got, expected = attend(ops, shape, dtype, SPANS, BUCKET)
    # In 16 bits each probability carries a rounding error of up to half a unit of itself, as in the reference.
    assert_close(got, expected, absolute=1e-5 if dtype == torch.float32 else 2**-8)


def test_float16(ops: TritonOps) -> None:
    shape = Shape(heads=2, kv_heads=2, head_dim=32, page_size=16)
    got, expected = attend(ops, shape, torch.float16, SPANS, BUCKET)
    assert_close(got, expected, absolute=2**-11)


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", range(16, 257, 16))
@pytest.mark.parametrize("page_size", [16, 24, 64])
def test_every_head_dim(ops: TritonOps, dtype: torch.dtype, head_dim: int, page_size: int) -> None:
    shape = Shape(heads=4, kv_heads=2, head_dim=head_dim, page_size=page_size)
    got, expected = attend(ops, shape, dtype, SPANS, BUCKET)
    assert_close(got, expected, absolute=1e-5 if dtype == torch.float32 else 2**-8)


def test_bits_depend_on_the_row_alone(ops: TritonOps, dtype: torch.dtype) -> None:
    """Rows of a long span cut anywhere, beside other requests, at any bucket, by any number of programs."""
    shape = Shape(heads=2, kv_heads=1, page_size=16)
    whole, _ = attend(ops, shape, dtype, [(1, 55, 20, 0)], 20)
    assert not whole.isnan().any()
    few = TritonOps(make_launcher(), programs=2, min_split=64)
    for cut, bucket, cutter in ((1, 24, ops), (9, 40, few), (16, 72, few)):
        spans = [(0, 3, 2, 1), (1, 55, cut, 0), (2, 130, 1, 0), (1, 55 + cut, 20 - cut, 0)]
        got, _ = attend(cutter, shape, dtype, spans, bucket)
        assert same_bits(torch.cat((got[2 : 2 + cut], got[3 + cut :])), whole)


def test_large_scores(ops: TritonOps) -> None:
    """Scores of +-1000 in falling and rising order: the running maximum must move without overflow."""
    shape = Shape(heads=1, kv_heads=1, page_size=16)
    for sign in (1, -1):
        step = prepared(ops, shape, torch.float32, [(0, 199, 1, 0)], 1)
        step.write_kv([(0, 0, 199)], layer=0)
        ramp = sign * torch.linspace(-1000, 1000, 200)
        for pos in range(200):
            page, offset = step.place(0, pos)
            step.pools.k[page, 0, 0, offset] = 0
            step.pools.k[page, 0, 0, offset, 0, 0] = ramp[pos] * 4
        qkv = torch.zeros(1, 3 * 16)
        qkv[0, 0] = 1
        out = framed(1, 16, torch.float32)
        ops.attention(out, qkv, step.io, step.pools, 0, 1)
        values = kv_of(shape, torch.float32, 0, 0)[1].double()
        assert_close(out[:1], torch.einsum("c,ckd->kd", ramp.double().softmax(0), values))


def test_a_shorter_work_list_leaves_the_rest_unread(ops: TritonOps) -> None:
    """What an earlier, larger step left in the list is not run again: its rows would be written."""
    shape = Shape(heads=1, kv_heads=1, page_size=16)
    step = prepared(ops, shape, torch.float32, [(0, 0, 40, 0)], 40)
    step.io.span_count.zero_()
    step.io.span_slot[0], step.io.span_start[0], step.io.span_count[0] = 1, 4, 3
    ops.prepare(step.io, step.pools, 40)
    rows: list[Row] = [(1, 0, 4), (1, 0, 5), (1, 0, 6)]
    step.write_kv(rows, layer=0)
    out = framed(40, 16, torch.float32)
    ops.attention(out, qkv_of(shape, torch.float32, rows, 40), step.io, step.pools, 0, 40)
    assert out[:3].isfinite().all()
    assert out[3:40].isnan().all()
