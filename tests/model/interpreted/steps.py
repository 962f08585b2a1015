"""A step with its rows and work list made by the kernels, and how near a kernel must come to float64."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from tests.model.cpu_step import CANARY, NAN, Row, Shape, Step
from wavegraph.model.io import Workspace
from wavegraph.model.ops.triton.ops import TritonOps

Span = tuple[int, int, int, int]
"""Slot, start, count, depth."""


def set_spans(step: Step, spans: Sequence[Span]) -> None:
    for index, span in enumerate(spans):
        for name, value in zip(("slot", "start", "count", "depth"), span, strict=True):
            getattr(step.io, f"span_{name}")[index] = value


def rows_of(spans: Sequence[Span]) -> list[Row]:
    return [(slot, depth, start + index) for slot, start, count, depth in spans for index in range(count)]


def prepared(ops: TritonOps, shape: Shape, dtype: torch.dtype, spans: Sequence[Span], bucket: int) -> Step:
    """A step whose spans are expanded at ``bucket``. Its scratch held NaN."""
    step = Step(shape, dtype)
    prepare(ops, step, spans, bucket)
    return step


def prepare(ops: TritonOps, step: Step, spans: Sequence[Span], bucket: int) -> None:
    width = torch.empty(1, step.shape.heads * step.shape.head_dim)
    work = Workspace(x=width, normed=width, branch=width, qkv=width, attn=width, mlp=width, coda_x=width)
    words = ops.scratch_size(step.io, step.pools, work)
    step.io = replace(step.io, scratch=torch.full((words,), -1, dtype=torch.int32))
    set_spans(step, spans)
    ops.prepare(step.io, step.pools, bucket)


def framed(rows: int, width: int, dtype: torch.dtype, extra: int = 3) -> Tensor:
    """Output of NaN rows, followed by rows of canaries."""
    out = torch.full((rows + extra, width), NAN, dtype=dtype)
    out[rows:] = CANARY
    return out


def assert_framed(out: Tensor, rows: int) -> None:
    assert (out[rows:] == torch.tensor(CANARY, dtype=out.dtype)).all()


def assert_close(got: Tensor, expected: Tensor, *, ulps: float = 1.0, absolute: float = 1e-5) -> None:
    """Within ``absolute`` of the largest value; in 16 bits within ``ulps`` of 2^-8 (2^-11) of each value besides."""
    error = (got.double() - expected).abs()
    bound = absolute * expected.abs().max() + torch.zeros_like(expected)
    if got.dtype != torch.float32:
        bound += expected.abs() * ulps * (2**-8 if got.dtype == torch.bfloat16 else 2**-11)
    assert torch.isfinite(got).all()
    assert (error <= bound).all(), f"worst: {(error - bound).max()} beyond the bound"
