"""A row's bits do not depend on the number of rows, its place, its neighbours, their grouping, or threads."""

import random
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from tests.model.cpu_step import ISAS, NAN, Row, Shape, Step, normal, qkv_of, same_bits
from wavegraph.model.ops.cpu import CpuOps

MOST = 70


@pytest.fixture(params=ISAS)
def ops(request: pytest.FixtureRequest) -> CpuOps:
    return CpuOps(request.param)


@pytest.fixture(params=(torch.float32, torch.bfloat16), ids=("fp32", "bf16"))
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


def batches(seed: int) -> Iterator[list[int]]:
    """Row numbers of many batches: each size from 1 to `MOST`, in a random choice and order, on 1 or 2 threads."""
    draw = random.Random(seed)
    for size in range(1, MOST + 1):
        torch.set_num_threads(1 + size % 2)
        yield draw.sample(range(MOST), size)


def assert_row_wise(run: Callable[[list[int]], Tensor], seed: int = 0) -> None:
    """``run`` gives the results of the rows named; they must be those of each row run alone."""
    torch.set_num_threads(1)
    alone = torch.cat([run([row]) for row in range(MOST)])
    for rows in batches(seed):
        assert same_bits(run(rows), alone[rows]), f"{len(rows)} rows"


@pytest.mark.parametrize(("inputs", "outputs"), [(64, 176), (176, 64), (67, 100), (1000, 40)])
@pytest.mark.parametrize("fused", [False, True])
def test_linear(ops: CpuOps, dtype: torch.dtype, inputs: int, outputs: int, fused: bool) -> None:
    x = normal(MOST, inputs, key=(1,), dtype=dtype)
    weight = normal(outputs * (1 + fused), inputs, key=(2,), dtype=dtype)
    packed = ops.pack_gate_up(weight) if fused else ops.pack_linear(weight)

    def run(rows: list[int]) -> Tensor:
        out = torch.empty(len(rows) + 2, outputs, dtype=dtype)
        padded = torch.cat((x[rows], torch.full((2, inputs), NAN, dtype=dtype)))
        (ops.linear_silu_mul if fused else ops.linear)(out, padded, packed, len(rows) + 2)
        return out[: len(rows)]

    assert_row_wise(run)


def test_many_rows_on_many_threads(ops: CpuOps, dtype: torch.dtype) -> None:
    """Rows are divided among threads too when panels are few."""
    x, weight = normal(300, 64, key=(1,), dtype=dtype), normal(33, 64, key=(2,), dtype=dtype)
    packed = ops.pack_linear(weight)
    results = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        results.append(torch.full((300, 33), NAN, dtype=dtype))
        ops.linear(results[-1], x, packed, 300)
    assert torch.isfinite(results[0]).all()
    assert same_bits(results[0], results[1])
    assert same_bits(results[0], results[2])


def test_norms(ops: CpuOps, dtype: torch.dtype) -> None:
    size = 301
    x, branch = (normal(MOST, size, key=(key,), dtype=dtype) for key in (1, 2))
    weight, branch_weight = (normal(size, key=(key,), dtype=dtype) for key in (3, 4))

    def run(rows: list[int]) -> Tensor:
        stream, out, plain = (
            x[rows],
            torch.empty(len(rows), size, dtype=dtype),
            torch.empty(len(rows), size, dtype=dtype),
        )
        ops.norm(plain, stream, weight, 1e-6, len(rows))
        ops.residual_norm(stream, out, branch[rows], branch_weight, weight, 1e-6, len(rows))
        return torch.cat((stream, out, plain), dim=1)

    assert_row_wise(run)


def test_rope_write(ops: CpuOps, dtype: torch.dtype) -> None:
    shape = Shape(head_dim=48)
    every: list[Row] = [(row % 3, row % 2, row) for row in range(MOST)]
    cos, sin = (normal(200, 48, key=(key,), dtype=dtype) for key in (1, 2))

    def run(rows: list[int]) -> Tensor:
        chosen = [every[row] for row in rows]
        step = Step(shape, dtype, layout=len(rows))
        step.set_rows(chosen, bucket=len(rows) + 1)
        qkv = qkv_of(shape, dtype, chosen, bucket=len(rows) + 1)
        ops.rope_write(qkv, step.io, step.pools, cos, sin, 1, len(rows) + 1)
        kept = []
        for slot, depth, pos in chosen:
            page, offset = step.place(slot, pos)
            kept += [step.pools.k[page, depth, 1, offset].flatten(), step.pools.v[page, depth, 1, offset].flatten()]
        return torch.cat((qkv[: len(rows)], torch.stack(kept).view(len(rows), -1)), dim=1)

    assert_row_wise(run)


def test_scatter_gate(ops: CpuOps, dtype: torch.dtype) -> None:
    shape = Shape(hidden=301)
    h = normal(MOST, shape.hidden, key=(1,), dtype=dtype)
    weight, bias = normal(shape.hidden, key=(2,), dtype=dtype), normal(1, key=(3,), dtype=dtype)

    def run(rows: list[int]) -> Tensor:
        step = Step(shape, dtype, layout=len(rows))
        step.set_rows([(row % 3, row % 2, row) for row in rows], bucket=len(rows))
        ops.scatter_gate(h[rows], step.io, step.pools, weight, bias, len(rows))
        places = [(*step.place(row % 3, row), row % 2) for row in rows]
        return torch.stack([step.pools.gate[place] for place in places]).unsqueeze(1)

    assert_row_wise(run)


def random_spans(draw: random.Random, shape: Shape) -> list[Row]:
    """Rows of random spans: at most one per slot and depth, so that no position runs twice in a plane."""
    rows: list[Row] = []
    planes = [(slot, depth) for slot in range(shape.slots) for depth in range(shape.depths)]
    for slot, depth in draw.sample(planes, draw.randint(1, len(planes))):
        start = draw.choice([0, 1, 58, 63, 64, 100, 127, draw.randrange(shape.length - 1)])
        count = min(draw.choice([1, 2, 7, 16, 40]), shape.length - start, shape.rows - 2 - len(rows))
        rows += [(slot, depth, pos) for pos in range(start, start + count)]
    return rows


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "page_size"), [(4, 2, 16, 5), (2, 2, 128, 16), (6, 1, 48, 64), (3, 3, 40, 1)]
)
def test_attention(ops: CpuOps, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, page_size: int) -> None:
    """Rows in spans of every length, among others and padding, in two layouts of the pool, on 1 and 2 threads."""
    shape = Shape(heads=heads, kv_heads=kv_heads, head_dim=head_dim, page_size=page_size)
    draw = random.Random(1)
    alone: dict[Row, Tensor] = {}
    whole = Step(shape, dtype, layout=0)
    whole.write_kv([(slot, depth, 199) for slot in range(shape.slots) for depth in range(shape.depths)], layer=1)

    def run(step: Step, rows: list[Row], bucket: int) -> Tensor:
        step.set_rows(rows, bucket)
        out = torch.full((bucket, heads * head_dim), NAN, dtype=dtype)
        ops.attention(out, qkv_of(shape, dtype, rows, bucket), step.io, step.pools, 1, bucket)
        return out[: len(rows)]

    for trial in range(10):
        rows = random_spans(draw, shape)
        bare = Step(shape, dtype, layout=trial)  # its KV ends at the batch's last row of each plane
        bare.write_kv(rows, layer=1)
        last = {(slot, depth): pos for slot, depth, pos in rows}
        broken = {(*plane, pos) for plane, pos in last.items()} if trial % 3 == 0 else set()
        for slot, depth, pos in broken:  # no earlier row of its span may notice
            page, offset = bare.place(slot, pos)
            bare.pools.k[page, depth, 1, offset] = NAN
            bare.pools.v[page, depth, 1, offset] = NAN
        if trial % 3 == 1:
            draw.shuffle(rows)
        torch.set_num_threads(1 + trial % 2)
        got = run(bare, rows, len(rows) + 2)
        torch.set_num_threads(1)
        for index, row in enumerate(rows):
            if row in broken:
                continue
            if row not in alone:
                alone[row] = run(whole, [row], 1)[0]
            assert same_bits(got[index], alone[row]), f"trial {trial}, row {row}"
