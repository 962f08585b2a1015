"""Values of the C++ operators against float64, on fresh inputs, with NaN and canaries where they may not reach."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.model.cpu_step import CANARY, CODA, ISAS, NAN, Shape, Step, kv_of, normal, qkv_of, seeded
from tests.model.op_checks import assert_close, check_rope_write, check_scatter_gate, framed
from wavegraph.errors import ConfigError
from wavegraph.model.ops.aten import AtenOps
from wavegraph.model.ops.cpu import CpuOps
from wavegraph.model.sampling import Action, Column

DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(params=ISAS)
def ops(request: pytest.FixtureRequest) -> CpuOps:
    return CpuOps(request.param)


@pytest.fixture(params=DTYPES, ids=("fp32", "bf16"))
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


SIZES = [(1, 1, 1), (1, 64, 176), (5, 67, 33), (16, 176, 64), (13, 64, 256), (29, 100, 250), (64, 48, 31)]


@pytest.mark.parametrize(("rows", "inputs", "outputs"), SIZES)
def test_linear(ops: CpuOps, dtype: torch.dtype, rows: int, inputs: int, outputs: int) -> None:
    x = normal(rows + 3, inputs, key=(1, rows), dtype=dtype)
    x[rows:] = NAN
    weight = normal(outputs, inputs, key=(2, outputs), dtype=dtype)
    out = framed(rows, outputs, dtype)
    ops.linear(out, x, ops.pack_linear(weight), rows)
    assert_close(out[:rows], x[:rows].double() @ weight.double().T)
    assert (out[rows:] == torch.tensor(CANARY, dtype=dtype)).all()


@pytest.mark.parametrize(("rows", "inputs", "outputs"), SIZES)
def test_linear_silu_mul(ops: CpuOps, dtype: torch.dtype, rows: int, inputs: int, outputs: int) -> None:
    x = normal(rows + 3, inputs, key=(1, rows), dtype=dtype)
    x[rows:] = NAN
    weight = normal(2 * outputs, inputs, key=(2, outputs), dtype=dtype) / inputs**0.5
    out = framed(rows, outputs, dtype)
    ops.linear_silu_mul(out, x, ops.pack_gate_up(weight), rows)
    gate, up = (x[:rows].double() @ weight.double().T).chunk(2, dim=1)
    assert_close(
        out[:rows], torch.nn.functional.silu(gate) * up, ulps=3, absolute=1e-5 if dtype == torch.float32 else 1e-3
    )
    assert (out[rows:] == torch.tensor(CANARY, dtype=dtype)).all()


def test_silu_at_extremes(ops: CpuOps) -> None:
    gate = torch.tensor([-1e30, -200.0, -88.0, -20.0, -0.0, 1e-30, 20.0, 88.0, 200.0, 1e30])
    weight = torch.cat((gate, torch.ones(10))).unsqueeze(1)
    out = torch.empty(1, 10)
    ops.linear_silu_mul(out, torch.ones(1, 1), ops.pack_gate_up(weight), 1)
    # Below -87.3 the exponential is held, so what should be less than 1e-35 may be larger, and still next to nothing.
    torch.testing.assert_close(out[0].double(), torch.nn.functional.silu(gate.double()), rtol=1e-6, atol=1e-5)


def rms(x: Tensor, weight: Tensor) -> Tensor:
    x = x.double()
    return x / (x.square().mean(dim=1, keepdim=True) + 1e-6).sqrt() * weight.double()


@pytest.mark.parametrize("size", [1, 7, 24, 64, 200])
def test_norms(ops: CpuOps, dtype: torch.dtype, size: int) -> None:
    rows = 5
    x, branch = (normal(rows, size, key=(key, size), dtype=dtype) for key in (1, 2))
    weight, branch_weight = (normal(size, key=(key, size), dtype=dtype) for key in (3, 4))
    out = framed(rows, size, dtype)
    ops.norm(out, x, weight, 1e-6, rows)
    assert_close(out[:rows], rms(x, weight), ulps=2)

    stream = torch.cat((x, torch.full((3, size), CANARY).to(dtype)))
    out = framed(rows, size, dtype)
    ops.residual_norm(stream, out, branch, branch_weight, weight, 1e-6, rows)
    sums = x.double() + rms(branch, branch_weight)
    assert_close(stream[:rows], sums, ulps=2, absolute=1e-5 if dtype == torch.float32 else 1e-2)
    assert_close(out[:rows], rms(stream[:rows], weight), ulps=2)
    for tensor in (out, stream):
        assert (tensor[rows:] == torch.tensor(CANARY, dtype=dtype)).all()


def attention_reference(shape: Shape, dtype: torch.dtype, row: tuple[int, int, int], qkv: Tensor) -> Tensor:
    slot, depth, pos = row
    k, v = (part[: pos + 1].double() for part in kv_of(shape, dtype, slot, depth))
    q = qkv[: shape.heads * shape.head_dim].double().view(shape.kv_heads, -1, shape.head_dim)
    scores = torch.einsum("kgd,ckd->kgc", q, k) * shape.head_dim**-0.5
    return torch.einsum("kgc,ckd->kgd", scores.softmax(dim=-1), v).flatten()


@pytest.mark.parametrize("head_dim", [8, 16, 30, 48, 64, 112, 128, 256])
@pytest.mark.parametrize("group", [1, 3])
def test_attention(ops: CpuOps, dtype: torch.dtype, head_dim: int, group: int) -> None:
    shape = Shape(heads=2 * group, head_dim=head_dim)
    step = Step(shape, dtype)
    rows = [(1, 0, 130), (1, 0, 131), (1, 1, 132), (0, 1, 0), (2, 1, 62), (2, 1, 63), (2, 1, 64), (1, 1, 199)]
    step.write_kv(rows, layer=1)
    step.set_rows(rows, bucket=10)
    qkv = qkv_of(shape, dtype, rows, bucket=10)
    out = framed(10, shape.heads * head_dim, dtype)
    ops.attention(out, qkv, step.io, step.pools, 1, 10)
    expected = torch.stack([attention_reference(shape, dtype, row, qkv[i]) for i, row in enumerate(rows)])
    # In bfloat16 each probability carries a rounding error of up to 2^-9 of itself, as in the reference.
    assert_close(out[: len(rows)], expected, absolute=1e-5 if dtype == torch.float32 else 2**-8)
    assert (out[10:] == torch.tensor(CANARY, dtype=dtype)).all()


def test_attention_over_large_scores(ops: CpuOps) -> None:
    """Scores of +-1000 in falling and rising order: the running maximum must move without overflow."""
    shape = Shape(heads=2)
    for sign in (1, -1):
        step = Step(shape, torch.float32)
        rows = [(0, 0, 199)]
        step.write_kv(rows, layer=0)
        ramp = sign * torch.linspace(-1000, 1000, 200)
        for pos in range(200):
            page, offset = step.place(0, pos)
            step.pools.k[page, 0, 0, offset] = 0
            step.pools.k[page, 0, 0, offset, :, 0] = ramp[pos] * 4
        step.set_rows(rows, bucket=1)
        qkv = torch.zeros(1, 6 * 16)
        qkv[0, [0, 16]] = 1
        out = framed(1, 32, torch.float32)
        ops.attention(out, qkv, step.io, step.pools, 0, 1)
        values = kv_of(shape, torch.float32, 0, 0)[1].double()
        weights = ramp.double().softmax(0)
        assert_close(out[:1], torch.einsum("c,ckd->kd", weights, values).flatten()[None])


@pytest.mark.parametrize("head_dim", [8, 16, 48, 128])
def test_rope_write(ops: CpuOps, dtype: torch.dtype, head_dim: int) -> None:
    check_rope_write(ops, Shape(head_dim=head_dim), dtype)


def test_scatter_gate(ops: CpuOps, dtype: torch.dtype) -> None:
    check_scatter_gate(ops, dtype)


def test_gathers(ops: CpuOps, dtype: torch.dtype) -> None:
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
    assert torch.equal(out[:3], torch.stack((embedding[42], retained[1], retained[2])))
    assert (out[5:] == torch.tensor(CANARY, dtype=dtype)).all()
    out = framed(5, shape.hidden, dtype)
    ops.coda_gather(out, step.io, step.pools, 5)
    assert torch.equal(out[:3], retained)
    assert (out[5:] == torch.tensor(CANARY, dtype=dtype)).all()


def test_tables_and_rows_equal_aten() -> None:
    ops, shape = CpuOps(), Shape()
    steps = [Step(shape, torch.float32) for _ in range(2)]
    for step in steps:
        for index, span in enumerate([(1, 5, 8, 0), (0, 0, 1, 1), (2, 190, 10, 0)]):
            for name, value in zip(("slot", "start", "count", "depth"), span, strict=True):
                getattr(step.io, f"span_{name}")[index] = value
        step.io.token_slot[0], step.io.token_pos[0], step.io.token_id[0] = 1, 9, 77
        step.io.page_slot[0], step.io.page_index[0], step.io.page_id[0] = 1, 2, 1
        step.io.row_page.fill_(-9)
        step.io.param_slot[0], step.io.param_rows[0, 5] = 2, 9
    for implementation, step in zip((ops, AtenOps()), steps, strict=True):
        implementation.update_tables(step.io)
        implementation.prepare(step.io, step.pools, 30)
    for name in ("token_table", "page_table", "params", "row_slot", "row_pos", "row_depth", "row_page", "row_offset"):
        assert torch.equal(getattr(steps[0].io, name), getattr(steps[1].io, name)), name


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("span_slot", 4, "span: .slot 4"),
        ("span_start", 200, "span: .slot 0, 40"),
        ("span_start", -1, "span_start: must be at least 0, got -1"),
        ("span_count", 31, "30 rows"),
        ("span_count", -1, "30 rows"),
        ("span_depth", 2, "span_depth"),
        ("token_pos", 201, "token updates"),
        ("param_slot", 4, "parameter updates"),
        ("page_id", 200, "page 200"),
        ("page_id", -1, "page -1"),
    ],
)
def test_what_lies_outside_is_refused(field: str, value: int, words: str) -> None:
    """Pages are looked at up to the span's last position: attention reads them all."""
    step = Step(Shape(), torch.float32)
    step.io.span_slot[0], step.io.span_start[0], step.io.span_count[0] = 0, 6, 1
    step.io.token_slot[0], step.io.page_slot[0], step.io.page_id[0] = 0, 0, 3
    getattr(step.io, field)[0] = value

    def run(ops: CpuOps) -> None:
        ops.update_tables(step.io)
        ops.prepare(step.io, step.pools, 30)

    with pytest.raises(RuntimeError, match=words):
        run(CpuOps())


@pytest.mark.parametrize(
    ("field", "value", "words"), [("slot", 4, "slot 4"), ("pos", 200, "coda row"), ("depth", 2, "coda_depth")]
)
def test_coda_rows_outside_are_refused(field: str, value: int, words: str) -> None:
    step, ops = Step(Shape(), torch.float32), CpuOps()
    step.io.params[:, Column.EXIT_COPY] = 1
    for name, entry in zip(CODA, (0, 3, 1, Action.GATE), strict=True):
        getattr(step.io, f"coda_{name}")[0] = entry
    getattr(step.io, f"coda_{field}")[0] = value
    for run in (ops.leave, ops.copy_exits):
        step.io.coda_left[0] = 1
        with pytest.raises(RuntimeError, match=words):
            run(step.io, step.pools, 1)


def test_leave_equals_aten() -> None:
    """Gate logits of all sizes, thresholds at the masses they give."""
    shape = Shape(depths=6)
    step = Step(shape, torch.float32)
    step.pools.gate.copy_(torch.randn(step.pools.gate.shape, generator=seeded(1)) * 5)
    step.io.page_table[:, :14] = torch.arange(14)  # 14 pages of 5 positions for all requests
    step.io.coda_slot[:70] = torch.arange(70) % 3
    step.io.coda_pos[:70] = torch.arange(70)
    step.io.coda_depth[:70] = torch.arange(70) % 6
    step.io.coda_action[:70] = Action.GATE
    left = []
    for threshold in (0.0, 0.1, 0.5, 0.9, 0.999, 1.0, 1.0000001):
        step.io.params[:, Column.EXIT_THRESHOLD] = torch.tensor(threshold).view(torch.int32)
        for ops in (CpuOps(), AtenOps()):
            step.io.coda_left.fill_(-1)
            ops.leave(step.io, step.pools, 70)
            left.append(step.io.coda_left[:70].clone())
        assert torch.equal(left[-1], left[-2]), threshold
    counts = [int(each.sum()) for each in left[::2]]
    assert counts[0] == 70
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > counts[2] > counts[-1] >= 11


@settings(max_examples=50)
@given(vocab=st.integers(1, 70), seed=st.integers(0, 10**6), values=st.integers(1, 5))
def test_the_first_of_the_largest_is_drawn(vocab: int, seed: int, values: int) -> None:
    for dtype in DTYPES:
        for isa in ISAS:
            step = Step(Shape(vocab=vocab), dtype)
            levels = torch.randint(-values, 1, (6, vocab), generator=torch.Generator().manual_seed(seed))
            step.io.logits[:6] = levels.to(dtype)
            expected = torch.tensor([row.index(max(row)) for row in levels.tolist()], dtype=torch.int32)
            step.io.logits[2] = NAN
            expected[2] = 0
            step.io.coda_slot[0], step.io.coda_pos[0] = 1, 199
            step.io.coda_left[:5] = 1
            expected[5] = -1
            CpuOps(isa).draw_greedy(step.io, 6)
            assert torch.equal(step.io.coda_token[:6], expected)
            assert (step.io.coda_token[6:] == -7).all()
            stored = torch.zeros_like(step.io.token_table[:-1])
            stored[1, 200] = expected[0]
            assert torch.equal(step.io.token_table[:-1], stored)


def test_float16_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"float32 or bfloat16, got torch\.float16"):
        CpuOps().pack_linear(torch.zeros(4, 4, dtype=torch.float16))


def test_wrong_arguments_are_refused() -> None:
    ops = CpuOps()
    weight = ops.pack_linear(torch.zeros(8, 4))
    x, out = torch.zeros(3, 4), torch.zeros(3, 8)
    for bad_out, bad_x, rows, words in [
        (out, x, 4, "holds 3 rows"),
        (out, x, 0, "asked for 0"),
        (out, x.double(), 3, "float32 or bfloat16"),
        (out, torch.zeros(4, 3).T, 3, "contiguous"),
        (torch.zeros(3, 16)[:, :8], x, 3, "contiguous"),
        (out.bfloat16(), x, 3, "out: needs"),
        (out, torch.zeros(3, 5), 3, "weight: dimension"),
    ]:
        with pytest.raises(RuntimeError, match=words):
            ops.linear(bad_out, bad_x, weight, rows)
