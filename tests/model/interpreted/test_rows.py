"""Kernels that take each row by itself, tables and work lists: against float64, or the ATen operators' bits."""

import pytest
import torch
from torch import Tensor

from tests.model.cpu_step import CANARY, NAN, Shape, Step, normal
from tests.model.interpreted.launcher import make_launcher
from tests.model.interpreted.steps import (
    Span,
    assert_close,
    assert_framed,
    framed,
    prepared,
    set_spans,
)
from tests.model.op_checks import check_rope_write, check_scatter_gate
from wavegraph.model.ops.aten import AtenOps
from wavegraph.model.ops.triton import ops as triton_ops
from wavegraph.model.ops.triton.ops import TritonOps
from wavegraph.model.ops.triton.scratch import Splits, most_tiles, work_list

SIZES = [(1, 16, 33), (5, 67, 130), (70, 48, 64)]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("rows", "inputs", "outputs"), SIZES)
def test_linear(dtype: torch.dtype, deterministic: bool, rows: int, inputs: int, outputs: int) -> None:
    ops = TritonOps(make_launcher(), deterministic=deterministic)
    x = normal(rows + 3, inputs, key=(1, rows), dtype=dtype)
    x[rows:] = NAN
    weight = normal(outputs, inputs, key=(2, outputs), dtype=dtype)
    out = framed(rows, outputs, dtype)
    ops.linear(out, x, ops.pack_linear(weight), rows)
    assert_close(out[:rows], x[:rows].double() @ weight.double().T)
    assert_framed(out, rows)


def test_a_row_of_the_deterministic_product_has_its_bits(dtype: torch.dtype) -> None:
    ops = TritonOps(make_launcher(), deterministic=True)
    x, weight = normal(70, 40, key=(1,), dtype=dtype), normal(50, 40, key=(2,), dtype=dtype)
    whole, alone = (torch.full((70, 50), NAN, dtype=dtype) for _ in range(2))
    ops.linear(whole, x, weight, 70)
    ops.linear(alone, x[69:].clone(), weight, 1)
    assert torch.equal(alone[0], whole[69])


@pytest.mark.parametrize(("rows", "inputs", "outputs"), SIZES[:2])
def test_linear_silu_mul(ops: TritonOps, dtype: torch.dtype, rows: int, inputs: int, outputs: int) -> None:
    x = normal(rows + 3, inputs, key=(1, rows), dtype=dtype)
    x[rows:] = NAN
    weight = normal(2 * outputs, inputs, key=(2, outputs), dtype=dtype) / inputs**0.5
    out = framed(rows, outputs, dtype)
    ops.linear_silu_mul(out, x, ops.pack_gate_up(weight), rows)
    gate, up = (x[:rows].double() @ weight.double().T).chunk(2, dim=1)
    exact = torch.nn.functional.silu(gate) * up
    assert_close(out[:rows], exact, ulps=3, absolute=1e-5 if dtype == torch.float32 else 1e-3)
    assert_framed(out, rows)


def rms(x: Tensor, weight: Tensor) -> Tensor:
    x = x.double()
    return x / (x.square().mean(dim=1, keepdim=True) + 1e-6).sqrt() * weight.double()


@pytest.mark.parametrize("size", [24, 64, 200])
def test_norms(ops: TritonOps, dtype: torch.dtype, size: int) -> None:
    rows = 3
    x, branch = (normal(rows, size, key=(key, size), dtype=dtype) for key in (1, 2))
    weight, branch_weight = (normal(size, key=(key, size), dtype=dtype) for key in (3, 4))
    out = framed(rows, size, dtype)
    ops.norm(out, x, weight, 1e-6, rows)
    assert_close(out[:rows], rms(x, weight), ulps=2)
    assert_framed(out, rows)

    stream = torch.cat((x, torch.full((3, size), CANARY).to(dtype)))
    out = framed(rows, size, dtype)
    ops.residual_norm(stream, out, branch, branch_weight, weight, 1e-6, rows)
    sums = x.double() + rms(branch, branch_weight)
    assert_close(stream[:rows], sums, ulps=2, absolute=1e-5 if dtype == torch.float32 else 1e-2)
    assert_close(out[:rows], rms(stream[:rows], weight), ulps=2)
    assert_framed(out, rows)
    assert_framed(stream, rows)


def test_norm_rounds_before_the_weight(ops: TritonOps) -> None:
    x, weight = normal(4, 24, key=(1,), dtype=torch.bfloat16), normal(24, key=(2,), dtype=torch.bfloat16)
    out = torch.full_like(x, NAN)
    ops.norm(out, x, weight, 1e-6, 4)
    exact = rms(x, torch.ones(24)).bfloat16()
    assert torch.equal(out, weight * exact)


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 16), (1, 1, 48), (6, 3, 128)])
def test_rope_write(ops: TritonOps, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int) -> None:
    check_rope_write(ops, Shape(heads=heads, kv_heads=kv_heads, head_dim=head_dim), dtype)


def test_scatter_gate(ops: TritonOps, dtype: torch.dtype) -> None:
    check_scatter_gate(ops, dtype)


def test_gathers(ops: TritonOps, dtype: torch.dtype) -> None:
    shape = Shape()
    step = Step(shape, dtype)
    rows = [(1, 0, 7), (0, 1, 0), (2, 1, 199)]
    step.set_rows(rows, bucket=5)
    embedding = normal(shape.vocab, shape.hidden, key=(1,), dtype=dtype)
    retained = normal(3, shape.hidden, key=(2,), dtype=dtype)
    for index, (slot, _, pos) in enumerate(rows):
        step.pools.hidden[step.place(slot, pos)] = retained[index]
        step.io.coda_slot[index], step.io.coda_pos[index] = slot, pos
    step.io.token_table[1, 7] = 42
    step.io.token_table[shape.slots] = 2**30  # the scratch request's token is arbitrary
    out = framed(5, shape.hidden, dtype)
    ops.gather(out, step.io, step.pools, embedding, 5)
    assert torch.equal(out[:5], torch.stack((embedding[42], *retained[1:], *torch.zeros_like(retained[:2]))))
    assert_framed(out, 5)
    out = framed(5, shape.hidden, dtype)
    ops.coda_gather(out, step.io, step.pools, 5)
    assert torch.equal(out[:5], torch.cat((retained, torch.zeros_like(retained[:2]))))
    assert_framed(out, 5)


SPAN_LISTS: list[list[Span]] = [
    [],
    [(0, 0, 1, 0)],
    [(1, 5, 8, 0), (0, 0, 1, 1), (2, 190, 10, 0)],
    [(0, 0, 17, 0), (2, 60, 33, 1), (1, 199, 1, 1)],
    [(index % 3, index, 1, index % 2) for index in range(60)],
]


@pytest.mark.parametrize("spans", SPAN_LISTS, ids=len)
def test_rows_and_work_list(ops: TritonOps, spans: list[Span], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows as ATen expands them; each tile's splits are listed in turn, and no more are live. Sums run over blocks."""
    monkeypatch.setattr(triton_ops, "_SPAN_BLOCK", 16)
    shape, bucket = Shape(), max(1, sum(span[2] for span in spans) + 3)
    step = prepared(ops, shape, torch.float32, spans, bucket)
    aten = Step(shape, torch.float32)
    set_spans(aten, spans)
    AtenOps().prepare(aten.io, aten.pools, bucket)
    for name in ("slot", "pos", "depth", "page", "offset"):
        assert torch.equal(getattr(step.io, f"row_{name}"), getattr(aten.io, f"row_{name}")), name

    tiles, items, row = [], [], 0
    for slot, start, count, depth in spans:
        for skipped in range(0, count, 16):
            length = min(16, count - skipped)
            items += [(len(tiles), part) for part in range(-(-(start + skipped + length) // 64))]
            tiles.append((row + skipped, length, slot, depth, start + skipped))
        row += count
    work = work_list(step.io, Splits.of(shape.blocks * shape.page_size, 64, 16, 64), 16)
    assert len(tiles) <= most_tiles(bucket, shape.rows, 16)
    assert list(map(tuple, work.tiles.view(-1, 5)[: len(tiles)].tolist())) == tiles
    assert work.live.tolist() == [len(items), len(tiles)]
    assert list(map(tuple, work.items.view(-1, 2)[: len(items)].tolist())) == items


def test_tables_equal_aten(ops: TritonOps) -> None:
    steps = [Step(Shape(), torch.float32) for _ in range(2)]
    for implementation, step in zip((ops, AtenOps()), steps, strict=True):
        step.io.token_slot[0], step.io.token_pos[0], step.io.token_id[0] = 1, 9, 77
        step.io.token_slot[71], step.io.token_pos[71], step.io.token_id[71] = 2, 200, 5
        step.io.page_slot[0], step.io.page_index[0], step.io.page_id[0] = 1, 2, 1
        step.io.page_slot[3], step.io.page_index[3], step.io.page_id[3] = 0, 39, 17
        step.io.param_slot[1], step.io.param_rows[1] = 2, torch.arange(step.io.param_rows.shape[1])
        implementation.update_tables(step.io)
    for name in ("token_table", "page_table", "params"):
        assert torch.equal(getattr(steps[0].io, name), getattr(steps[1].io, name)), name


def test_updates_not_in_use_touch_nothing(ops: TritonOps) -> None:
    """Not even scratch, so that no two of them race for it."""
    step = Step(Shape(), torch.float32)
    for table in (step.io.token_table, step.io.page_table, step.io.params):
        table.fill_(-3)
    ops.update_tables(step.io)
    for table in (step.io.token_table, step.io.page_table, step.io.params):
        assert (table == -3).all()
