"""What every set of operators must do alike, and how near its numbers must come."""

import torch
from torch import Tensor

from tests.model.cpu_step import CANARY, NAN, Shape, Step, normal, qkv_of
from wavegraph.model.ops.aten import AtenOps
from wavegraph.model.ops.base import Ops


def assert_close(got: Tensor, expected: Tensor, *, ulps: float = 1.0, absolute: float = 1e-5) -> None:
    """Within `absolute` of the largest value in float32; in bfloat16 within `ulps` of 2^-8 of each value besides."""
    error = (got.double() - expected).abs()
    bound = absolute * expected.abs().max() + torch.zeros_like(expected)
    if got.dtype == torch.bfloat16:
        bound += expected.abs() * ulps * 2**-8
    assert torch.isfinite(got).all()
    assert (error <= bound).all(), f"worst: {(error - bound).max()} beyond the bound"


def framed(rows: int, width: int, dtype: torch.dtype, extra: int = 3) -> Tensor:
    """Output of NaN rows, followed by rows of canaries."""
    out = torch.full((rows + extra, width), NAN, dtype=dtype)
    out[rows:] = CANARY
    return out


def check_rope_write(ops: Ops, shape: Shape, dtype: torch.dtype) -> None:
    """The bits of queries, keys and values are those of the ATen operators; padding is left alone."""
    step, aten = Step(shape, dtype), Step(shape, dtype)
    rows = [(1, 0, 7), (1, 0, 8), (0, 1, 0), (2, 1, 199)]
    angles = torch.outer(torch.arange(200.0), 10000 ** (-torch.arange(shape.head_dim // 2) / shape.head_dim * 2))
    cos, sin = (table.to(dtype).repeat(1, 2) for table in (angles.cos(), angles.sin()))
    qkv = qkv_of(shape, dtype, rows, bucket=6)
    qkv[4:] = CANARY  # padding, which is not even stored in scratch
    expected = qkv.clone()
    for engine in (step, aten):
        engine.set_rows(rows, bucket=6)
    ops.rope_write(qkv, step.io, step.pools, cos, sin, 1, 6)
    AtenOps().rope_write(expected, aten.io, aten.pools, cos, sin, 1, 4)
    # The same products and sums, in the same precision, in ATen and here: the bits are equal.
    torch.testing.assert_close(qkv, expected, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(step.pools.k, aten.pools.k, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(step.pools.v, aten.pools.v, rtol=0, atol=0, equal_nan=True)


def check_scatter_gate(ops: Ops, dtype: torch.dtype) -> None:
    """Hidden rows and the gate's logits go to their places, and nowhere else."""
    shape = Shape(hidden=70)
    step = Step(shape, dtype)
    rows = [(1, 0, 7), (0, 1, 0), (2, 1, 199)]
    step.set_rows(rows, bucket=5)
    h = normal(5, shape.hidden, key=(1,), dtype=dtype)
    h[3:] = CANARY  # padding, which is not even stored in scratch
    weight, bias = normal(shape.hidden, key=(2,), dtype=dtype), normal(1, key=(3,), dtype=dtype)
    ops.scatter_gate(h, step.io, step.pools, weight, bias, 5)
    places = [(*step.place(slot, pos), depth) for slot, depth, pos in rows]
    logits = torch.stack([step.pools.gate[place] for place in places])
    assert_close(logits.to(dtype), h[:3].double() @ weight.double() + bias.double())
    assert torch.equal(logits, logits.to(dtype).float())
    assert step.pools.gate.isfinite().sum() == 3
    expected = torch.full_like(step.pools.hidden, NAN)
    for index, (slot, _, pos) in enumerate(rows):
        expected[step.place(slot, pos)] = h[index]
    torch.testing.assert_close(step.pools.hidden, expected, rtol=0, atol=0, equal_nan=True)
