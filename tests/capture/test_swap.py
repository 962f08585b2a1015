"""Pages that leave for the host and come back, elsewhere or in another executor: not a bit changes."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from tests.capture.driver import Driver, Span, Step, make_executor, tiny_model
from tests.capture.verify import assert_same_bits, bits
from wavegraph.capture.device import CpuDevice
from wavegraph.capture.executor import Executor
from wavegraph.capture.swap import PageStore
from wavegraph.errors import CaptureError
from wavegraph.model.io import Pools

PROMPT = [3, 9, 27, 11, 60, 2, 5, 8, 40]
OTHER = [50, 40, 30, 20, 10]
KEY = 77


def run_half(driver: Driver, slot: int = 0) -> None:
    """A prompt half way through its wavefront: every depth somewhere else, the last page not full."""
    driver.add(slot, PROMPT)
    for start, count, depth in ((0, 6, 0), (0, 4, 1), (0, 3, 2), (6, 1, 0)):
        driver.run(driver.make_step([(slot, start, count, depth)]))


def finish(driver: Driver) -> dict[int, list[int]]:
    return driver.generate(5, chunk=3, budget=8)


def assert_undisturbed(driver: Driver, steps: Sequence[Span] = (), backend: str = "eager") -> None:
    """The rest of a request that moved equals, bit for bit, that of one that stayed and ran the same ``steps``."""
    reference = Driver(make_executor(tiny_model(backend), "eager"))
    run_half(reference)
    for span in steps:
        reference.run(reference.make_step([span]))
    assert finish(driver) == finish(reference)
    for key, gate in reference.gates.items():
        assert_same_bits(driver.gates[key], gate, f"gate of {key}")


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("backend", ["eager", "recorded", "compiled"])
def test_request_comes_back_to_other_pages(backend: str, asynchronous: bool) -> None:
    """Its pages go to another request in the step that swaps them out; that one ends, and it comes back."""
    executor = make_executor(tiny_model(backend), backend, num_pages=6, asynchronous=asynchronous)
    driver = Driver(executor)
    run_half(driver)
    pages = driver.requests[0].pages
    moved = driver.requests.pop(0)
    driver.free = [*pages, *driver.free]
    driver.add(1, OTHER)
    step = driver.make_step([(1, 0, 5, 0)])
    assert driver.requests[1].pages == pages[:2]
    step.swap_out = [(KEY, list(pages))]
    driver.run(step)
    assert executor.stats.swap.keys == 1
    assert executor.stats.swap.pages == len(pages)
    assert executor.stats.swap.bytes * (executor.limits.num_pages + 1) == executor.pool_bytes * len(pages)
    driver.generate(2, chunk=5, budget=8)
    driver.poison()

    driver.requests[0] = moved
    driver.free, new = [5, 1, 2, 3], [4, 0]
    step = driver.make_step([(0, 4, 2, 1)])
    driver.move_in(step, 0, KEY, new)
    driver.run(step)
    assert executor.stats.swap.keys == executor.stats.swap.bytes == 0
    assert_undisturbed(driver, [(0, 4, 2, 1)], backend)
    executor.close()


def test_request_goes_on_in_another_executor() -> None:
    """Mid-prompt, between steps, through plain CPU tensors."""
    source, target = (Driver(make_executor(tiny_model(), "recorded")) for _ in range(2))
    run_half(source)
    source.executor.swap_out(KEY, source.requests[0].pages)
    tensors = source.executor.take_swapped(KEY)
    assert {name: len(tensor) for name, tensor in tensors.items()} == {"k": 2, "v": 2, "hidden": 2, "gate": 2}
    assert source.executor.stats.swap.keys == 0
    with pytest.raises(CaptureError, match="key 77: is not on the host"):
        source.executor.take_swapped(KEY)

    target.executor.put_swapped(5, {name: tensor.clone() for name, tensor in tensors.items()})
    target.requests[0] = source.requests[0]
    step = Step(token_slot=[0] * 7, token_pos=list(range(7)), token_id=PROMPT[:7])
    target.free = target.free[5:]
    target.move_in(step, 0, 5, [3, 1])
    target.run(step)
    assert target.executor.stats.tables.hits == {1: 1}
    target.gates = source.gates
    assert_undisturbed(target)


def test_moves_of_a_step_run_in_order() -> None:
    """Out, in, drop: pages can be exchanged within one step, and what was just stored can be dropped."""
    executor = make_executor(tiny_model(), "eager", num_pages=4)
    pools = [executor.pools.k, executor.pools.v, executor.pools.hidden, executor.pools.gate]

    def values(page: int) -> list[Tensor]:
        return [bits(pool[page]) for pool in pools]

    for pool in pools:
        pool.copy_(torch.arange(5).view(5, *[1] * (pool.dim() - 1)).expand_as(pool))
    old = [values(page) for page in range(5)]
    swap = Step(swap_out=[(1, [0, 1]), (2, [2]), (3, [3])], swap_in=[(2, [0]), (1, [2, 3])], swap_drop=[3, 9])
    executor.poll(executor.submit(swap))
    for page, source in enumerate((2, 1, 0, 1, 4)):
        assert all(torch.equal(new, want) for new, want in zip(values(page), old[source], strict=True)), page
    stats = executor.stats.swap
    assert (stats.keys, stats.pages, stats.pages_out, stats.pages_in) == (0, 0, 4, 3)
    executor.poll(executor.submit(Step(swap_out=[(3, [0])])))


Moves = Sequence[tuple[int, list[int]]]

BAD_MOVES: dict[str, tuple[Moves, Moves, str]] = {
    "stored before": ([(KEY, [0])], [], "swap_out: key 77 is on the host already"),
    "twice in a step": ([(1, [0]), (1, [1])], [], "swap_out: key 1 is on the host already"),
    "scratch": ([(1, [4])], [], r"swap_out: page 4 of key 1 is outside 0\.\.3"),
    "page -1": ([], [(KEY, [0, -1])], r"swap_in: page -1 of key 77 is outside 0\.\.3"),
    "not there": ([(1, [0])], [(2, [0])], "swap_in: key 2 is not on the host"),
    "back twice": ([], [(KEY, [0, 1]), (KEY, [2, 3])], "swap_in: key 77 is not on the host"),
    "fewer pages": ([], [(KEY, [0])], "swap_in: key 77 has 2 pages on the host, not 1"),
    "one page twice": ([], [(KEY, [1, 1])], "swap_in: key 77 is to fill a page twice"),
    "a page of another": ([(1, [3])], [(1, [0]), (KEY, [1, 0])], "swap_in: key 77 is to fill a page twice"),
}


@pytest.mark.parametrize("case", BAD_MOVES)
def test_bad_moves_are_refused_whole(case: str) -> None:
    out, back, message = BAD_MOVES[case]
    executor = make_executor(tiny_model(), "eager", num_pages=4, max_in_flight=1)
    executor.swap_out(KEY, [0, 1])
    before = executor.stats.swap
    with pytest.raises(CaptureError, match=message):
        executor.submit(Step(swap_out=list(out), swap_in=list(back)))
    assert executor.stats.swap == before
    executor.poll(executor.submit(Step(swap_in=[(KEY, [2, 3])])))
    with pytest.raises(CaptureError, match="swap_in: key 77 is not on the host"):
        executor.submit(Step(swap_in=[(KEY, [2, 3])]))


def test_swap_of_a_step_that_is_refused_does_not_happen() -> None:
    executor = make_executor(tiny_model(), "eager")
    bad = Step(swap_out=[(KEY, [0])], page_slot=[9], page_index=[0], page_id=[0])
    with pytest.raises(CaptureError, match=r"page_slot\[0\]: 9"):
        executor.submit(bad)
    assert executor.stats.swap.keys == 0


def pools_of(dtype: torch.dtype = torch.float32, page_size: int = 4) -> Pools:
    kv = (6, 2, 1, page_size, 2, 8)
    hidden, gate = torch.randn(6, page_size, 16), torch.randn(6, page_size, 2)
    return Pools(torch.randn(kv).to(dtype), torch.randn(kv).to(dtype), hidden.to(dtype), gate)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("gate"), r"key 3: has tensors \['hidden', 'k', 'v'\]; the pools are"),
        (lambda t: t.update(more=torch.zeros(1)), "key 3: has tensors"),
        (lambda t: t.update(v=t["v"][:1]), r"key 3: v is \[1, 2, 1, 4, 2, 8\] torch\.float32 on cpu, but"),
        (lambda t: t.update(k=t["k"].half()), r"key 3: k is .* torch\.float16 on cpu"),
        (lambda t: t.update(hidden=torch.tensor(0.0)), "key 3: k is"),
        (lambda t: t.update(gate=t["gate"].to("meta")), "key 3: gate is .* on meta"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit_are_refused(change: object, message: str) -> None:
    store = PageStore(pools_of(), CpuDevice())
    store.accept([(1, [0, 5 - 1])], (), ())
    store.run([(1, [0, 4])], (), ())
    tensors = store.take(1)
    change(tensors)  # type: ignore[operator]
    with pytest.raises(CaptureError, match=message):
        store.put(3, tensors)
    assert store.stats.keys == 0


@pytest.mark.parametrize("other", [pools_of(torch.bfloat16), pools_of(page_size=8)], ids=["dtype", "page size"])
def test_pages_of_another_geometry_are_refused(other: Pools) -> None:
    source, target = PageStore(pools_of(), CpuDevice()), PageStore(other, CpuDevice())
    source.accept([(1, [0])], (), ())
    source.run([(1, [0])], (), ())
    with pytest.raises(CaptureError, match="export it from an engine of the same model and page size"):
        target.put(1, source.take(1))


def test_put_under_a_key_in_use_is_refused() -> None:
    executor: Executor = make_executor(tiny_model(), "eager")
    executor.swap_out(1, [0])
    executor.swap_out(2, [1])
    tensors = executor.take_swapped(1)
    with pytest.raises(CaptureError, match="key 2: is on the host already"):
        executor.put_swapped(2, tensors)
    executor.put_swapped(1, tensors)
