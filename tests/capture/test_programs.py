"""Recorded programs compute what plain ones do, bit for bit, whatever form their operators take."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from tests.capture.verify import verify_program
from wavegraph.capture.backends.recorded import plan_arena
from wavegraph.capture.backends.tape import StorageUse

ROWS, WIDTH = 5, 16


class Bench:
    """A few static tensors that programs read and write."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.x = torch.zeros(ROWS, WIDTH, dtype=dtype)
        self.w = torch.zeros(WIDTH, WIDTH, dtype=dtype)
        self.index = torch.zeros(ROWS, dtype=torch.int64)
        self.out = torch.zeros(ROWS, WIDTH, dtype=dtype)
        self.total = torch.zeros(ROWS, dtype=torch.float64)

    def change(self, number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        self.x.copy_(torch.randn(ROWS, WIDTH, generator=generator))
        self.w.copy_(torch.randn(WIDTH, WIDTH, generator=generator))
        self.index.copy_(torch.randint(ROWS, (ROWS,), generator=generator))

    def verify(self, program: Callable[["Bench"], object]) -> None:
        verify_program(lambda: program(self), vars(self), self.change)


def custom_op_program(b: Bench) -> None:
    torch.ops.wavegraph_test.accumulate(b.out, b.x * 2)
    b.total.copy_(torch.ops.wavegraph_test.row_sums(b.out))


@torch.library.custom_op("wavegraph_test::accumulate", mutates_args=("out",))
def accumulate(out: Tensor, x: Tensor) -> None:
    out += x


@torch.library.custom_op("wavegraph_test::row_sums", mutates_args=())
def row_sums(x: Tensor) -> Tensor:
    return x.double().sum(1)


PROGRAMS: dict[str, Callable[[Bench], object]] = {
    "out form": lambda b: torch.mm(b.x, b.w, out=b.out),
    "functional": lambda b: b.out.copy_(functional.silu(b.x @ b.w) * b.x),
    "in place": lambda b: b.out.add_(b.x).mul_(0.5).clamp_(min=-1),
    "in place on an intermediate": lambda b: b.out.copy_(b.x.mul(2).add_(1).rsqrt_()),
    "views": lambda b: b.out.t()[2:4].copy_(b.x.view(ROWS, 4, 4)[:, 1, :2].t()),
    "reshape that copies": lambda b: b.out.copy_(b.x.t().reshape(ROWS, WIDTH)),
    "converts": lambda b: b.out.copy_(b.x.to(torch.bfloat16).float().double()),
    "softmax": lambda b: b.out.copy_(torch.softmax(b.x, dim=-1, dtype=torch.float32)),
    "factories": lambda b: b.out.copy_(
        torch.arange(WIDTH) + torch.full((ROWS, 1), 2.5) + torch.zeros(1) + torch.ones(1) + torch.eye(ROWS, WIDTH)
    ),
    "filled like": lambda b: b.out.copy_(
        torch.zeros_like(b.x) + torch.ones_like(b.x) + torch.full_like(b.index, 2.5, dtype=torch.float32)[0]
        + b.x.new_full((WIDTH,), 3) + b.x.new_zeros(WIDTH) + b.x.new_ones(WIDTH)
    ),
    "empty, then written": lambda b: b.out.copy_(torch.empty_like(b.x).copy_(b.x).add_(1)),
    "gather": lambda b: b.out.copy_(b.x[b.index] + b.x.index_select(0, b.index)),
    "scatter": lambda b: b.out.index_put_((b.index,), b.x[0]),
    "embedding": lambda b: b.out.copy_(functional.embedding(b.index, b.x)),
    "several outputs": lambda b: (b.total.copy_(b.x.max(dim=1)[0]), b.out.copy_(b.x.sort(dim=1).values)),
    "list of views": lambda b: [
        half.copy_(other) for half, other in zip(b.out.chunk(2, 1), b.x.split(8, 1), strict=True)
    ],
    "list of copies": lambda b: b.out.copy_(torch.cat([p * 2 for p in torch.split_copy(b.x, 8, dim=1)], dim=1)),
    "cat and stack": lambda b: b.out.copy_(
        torch.stack([torch.cat((b.x, b.x), 1), torch.cat((b.x, -b.x), 1)])[1, :, 8:24]
    ),
    "no out form": lambda b: b.out.copy_(functional.layer_norm(b.x, (WIDTH,))),
    "attention": lambda b: b.out.copy_(torch.softmax(b.x @ b.x.t(), -1) @ b.x),
    "reductions": lambda b: b.total.copy_(b.x.cumsum(0).pow(2).mean(1) + b.x.argmax(1) + b.x.var(1)),
    "searchsorted": lambda b: b.total.copy_(torch.searchsorted(b.index.cumsum(0), torch.arange(ROWS), right=True)),
    "expanded": lambda b: b.out.copy_(b.x[:, :1].expand(ROWS, WIDTH) * b.x[:1].expand(ROWS, WIDTH)),
    "long chain of dead tensors": lambda b: b.out.copy_(_chain(b.x, 50)),
    "custom operators": custom_op_program,
}  # fmt: skip


def _chain(x: Tensor, length: int) -> Tensor:
    for step in range(length):
        x = x.sin() + step
    return x


@pytest.mark.parametrize("name", PROGRAMS)
def test_replay_equals_program(name: str) -> None:
    Bench().verify(PROGRAMS[name])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["out form", "functional", "in place", "reductions"])
def test_replay_equals_program_in_half_precision(name: str, dtype: torch.dtype) -> None:
    Bench(dtype).verify(PROGRAMS[name])


def test_python_value_that_is_baked_in_is_caught() -> None:
    counter = [0]

    def program(b: Bench) -> None:
        counter[0] += 1
        b.out.copy_(b.x * counter[0])

    with pytest.raises(AssertionError, match="round 0, out: bits differ"):
        Bench().verify(program)


def test_uninitialised_read_is_caught() -> None:
    bench = Bench()
    bench.out.fill_(1)
    with pytest.raises(AssertionError, match="out: bits differ"):
        bench.verify(lambda b: b.out.copy_(torch.empty_like(b.x).mul_(0)))


def test_views_cost_nothing_and_calls_are_counted() -> None:
    bench = Bench()
    facts = verify_program(lambda: bench.out.t().copy_(bench.x.t() + 1), vars(bench), bench.change)
    assert facts.nodes == 2
    assert facts.bytes == ROWS * WIDTH * 4
    assert facts.seconds > 0


def test_dead_intermediates_share_memory() -> None:
    bench = Bench()
    facts = verify_program(lambda: bench.out.copy_(_chain(bench.x, 50)), vars(bench), bench.change)
    assert facts.bytes <= 3 * ROWS * WIDTH * 4


UNARY: list[Callable[[Tensor, Bench], Tensor]] = [
    lambda t, b: t.sin(),
    lambda t, b: t.t().contiguous().t(),
    lambda t, b: torch.softmax(t, -1),
    lambda t, b: t @ b.w,
    lambda t, b: t[b.index],
    lambda t, b: t.to(torch.bfloat16).float(),
    lambda t, b: t.clone().add_(1),
    lambda t, b: t.cumsum(0),
    lambda t, b: t[:, torch.arange(WIDTH).flip(0)],
    lambda t, b: torch.cat(t.chunk(2, 1)[::-1], 1),
]
BINARY: list[Callable[[Tensor, Tensor], Tensor]] = [
    torch.add,
    torch.mul,
    lambda s, t: torch.where(s > t, s, t),
    lambda s, t: s - t.mean(0, keepdim=True),
]


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99), st.integers(0, 99)), min_size=1, max_size=25))
def test_random_programs(choices: list[tuple[int, int, int]]) -> None:
    """Any value may be read late, so memory that is given away too early shows."""

    def program(b: Bench) -> None:
        values = [b.x, b.out.clone()]
        for kind, left, right in choices:
            first, second = values[left % len(values)], values[right % len(values)]
            if kind % 2:
                values.append(UNARY[kind // 2 % len(UNARY)](first, b))
            else:
                values.append(BINARY[kind // 2 % len(BINARY)](first, second))
            if len(values) > 6:
                del values[kind % 5]
        b.out.copy_(sum(values[1:], values[0]))

    bench = Bench()
    verify_program(lambda: program(bench), vars(bench), bench.change, rounds=2)


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(0, 40), st.integers(0, 10)), max_size=60))
def test_arena_keeps_living_storages_apart(lives: list[tuple[int, int, int]]) -> None:
    uses = [StorageUse("", nbytes, None, first, first + length) for nbytes, first, length in lives]
    offsets, total = plan_arena(uses)
    for number, (use, offset) in enumerate(zip(uses, offsets, strict=True)):
        assert offset % 64 == 0
        assert 0 <= offset <= offset + use.nbytes <= total
        for other, place in zip(uses[:number], offsets[:number], strict=True):
            together = use.first <= other.last and other.first <= use.last
            apart = offset + use.nbytes <= place or place + other.nbytes <= offset
            assert apart or not together
