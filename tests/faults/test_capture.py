"""Faults of capture and replay that public engines had, one test each."""

import gc
import threading
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from tests.capture.driver import Driver, make_executor, tiny_model
from tests.capture.verify import assert_same_bits, bits
from wavegraph.buckets.ladder import Ladder
from wavegraph.capture.backends.compiled import CompiledBackend
from wavegraph.capture.backends.recorded import RecordedBackend
from wavegraph.capture.executor import Executor
from wavegraph.capture.ladder import CapturedLadder
from wavegraph.capture.static import StaticSet
from wavegraph.errors import CaptureError, ConfigError
from wavegraph.model.io import Pools, StepIO
from wavegraph.model.ops.aten import AtenOps
from wavegraph.model.ops.cpu import CpuOps

OPS = {"recorded": AtenOps, "compiled": CpuOps}
RECORDING = {"recorded": RecordedBackend, "compiled": CompiledBackend}
PROMPT = [3, 9, 27, 11, 60, 2, 5]


def run_prompt(driver: Driver, slot: int = 0, bucket: int | None = None) -> None:
    driver.add(slot, PROMPT)
    for depth in range(driver.depths):
        driver.run(driver.make_step([(slot, 0, 7, depth)], bucket=bucket))


@pytest.mark.parametrize("backend", OPS)
def test_hidden_sync_breaks_capture(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sync deep in an operator fails the capture, naming its bucket, operator and line, and nothing is kept."""
    original = OPS[backend].prepare

    def prepare(self: AtenOps | CpuOps, io: StepIO, pools: Pools, rows: int) -> None:
        original(self, io, pools, int(io.header[1]) or rows)  # type: ignore[arg-type]

    monkeypatch.setattr(OPS[backend], "prepare", prepare)
    with pytest.raises(CaptureError, match=r"^core\[8\]: Tensor\.__int__ at .*test_capture\.py:\d+ hands"):
        make_executor(tiny_model(backend), backend)
    make_executor(tiny_model(backend), "eager")


@pytest.mark.parametrize("backend", OPS)
def test_call_of_another_thread_breaks_capture(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original = OPS[backend].attention
    seen: list[float] = []

    def attention(self: AtenOps | CpuOps, *args: object) -> None:
        thread = threading.Thread(target=lambda: seen.append(torch.ones(3).sum().item()))
        thread.start()
        thread.join()
        original(self, *args)  # type: ignore[arg-type]

    plain = make_executor(tiny_model(backend), backend)
    monkeypatch.setattr(OPS[backend], "attention", attention)
    disturbed = make_executor(tiny_model(backend), backend)
    assert seen
    assert disturbed.core.facts[8].nodes == plain.core.facts[8].nodes


@pytest.mark.parametrize("backend", ["eager", "recorded", "compiled"])
@pytest.mark.parametrize(
    ("name", "pick"),
    [
        (r"work\.qkv", lambda executor: executor.work.qkv),
        (r"pools\.k", lambda executor: executor.pools.k),
        (r"io\.logits", lambda executor: executor.io.logits),
    ],
)
def test_workspace_that_grows_after_capture(backend: str, name: str, pick: Callable[[Executor], Tensor]) -> None:
    executor = make_executor(tiny_model(backend), backend)
    driver = Driver(executor)
    driver.add(0, PROMPT)
    step = driver.make_step([(0, 0, 7, 0)])
    tensor = pick(executor)
    tensor.set_(torch.zeros((2 * tensor.shape[0], *tensor.shape[1:]), dtype=tensor.dtype))
    with pytest.raises(CaptureError, match=f"^{name}: moved"):
        executor.submit(step)


@pytest.mark.parametrize("backend", ["eager", "recorded", "compiled"])
def test_weights_reloaded_at_new_addresses(backend: str) -> None:
    """Refused by name; a reload in place is seen by the next replay."""
    model = tiny_model(backend)
    executor = make_executor(model, backend)
    driver = Driver(executor)
    run_prompt(driver)
    before = driver.gates[0, 6, 2]
    model.weights.layers[1].down.mul_(2)
    run_prompt(driver)
    assert driver.gates[0, 6, 2] != before
    reference = Driver(make_executor(model, "eager"))
    run_prompt(reference)
    assert_same_bits(driver.gates[0, 6, 2], reference.gates[0, 6, 2], "gate after a reload in place")
    model.weights.layers[1].down.set_(model.weights.layers[1].down.clone())
    with pytest.raises(CaptureError, match=r"^model\.weights\.layers\[1\]\.down: moved"):
        run_prompt(driver)


@pytest.mark.parametrize("backend", ["recorded", "compiled"])
def test_key_of_the_graph_lacks_the_length_class(backend: str) -> None:
    """Recorded at context 0; replayed from the first position to the last, mixed in one bucket, it equals eager."""
    model = tiny_model(backend)
    drivers = [Driver(make_executor(model, each)) for each in ("eager", backend)]
    for driver in drivers:
        for slot, length in ((0, 31), (1, 1), (2, 16)):
            driver.add(slot, (PROMPT * 5)[:length])
        driver.generate(1, chunk=8, budget=8)
    for key, gate in drivers[0].gates.items():
        assert_same_bits(drivers[1].gates[key], gate, f"gate of {key}")
    assert max(position for _, position, _ in drivers[0].gates) == 30


@pytest.mark.parametrize("backend", OPS)
def test_ladder_does_not_reach_the_largest_batch(backend: str) -> None:
    """Limits and ladder must agree, every batch they allow has a bucket, and one beyond is refused and counted."""
    executor = make_executor(tiny_model(backend), backend, ladder=(1, 3, 8))
    for ladder in (executor.core, executor.coda):
        for rows in range(1, ladder.ladder.max + 1):
            assert ladder.fits(rows)
            assert ladder.bucket(rows) in ladder.facts
        assert not ladder.fits(0)
        assert not ladder.fits(ladder.ladder.max + 1)
    larger = replace(executor.limits, max_rows=16)
    with pytest.raises(ConfigError, match="max_rows: 16 must be the largest core bucket, 8"):
        Executor(tiny_model(backend), larger, Ladder([1, 8]), Ladder([3]), backend)
    driver = Driver(executor)
    driver.add(0, PROMPT + PROMPT)
    step = driver.make_step([(0, 0, 9, 0)], bucket=8)
    with pytest.raises(CaptureError, match="core: 9 rows do not fit bucket 8"):
        executor.submit(step)
    step.bucket = 9
    with pytest.raises(CaptureError, match="core: bucket 9 was not recorded"):
        executor.submit(step)
    assert executor.stats.core.misses == {"rows do not fit": 1, "bucket not recorded": 1}
    assert not executor.stats.core.hits


@pytest.mark.parametrize("backend", OPS)
def test_hits_and_padding_are_counted(backend: str) -> None:
    executor = make_executor(tiny_model(backend), backend, ladder=(4, 8))
    run_prompt(Driver(executor))
    stats = executor.stats
    assert (stats.steps, stats.core.hits, stats.core.rows, stats.core.padding_rows) == (3, {8: 3}, 21, 3)


@pytest.mark.parametrize("name", OPS)
def test_graph_memory_is_not_in_the_budget(name: str) -> None:
    """All buckets share the memory of the largest one, and its bytes are told."""
    backend = RECORDING[name]()
    x, out = torch.ones(8, 64), torch.zeros(8, 64)
    ladder = CapturedLadder("core", Ladder([1, 2, 4, 8]), lambda rows: out[:rows].copy_(x[:rows].exp()))
    ladder.capture(backend, StaticSet({"x": x, "out": out}), lambda: None)
    assert [ladder.facts[size].bytes for size in (8, 4, 2, 1)] == [2048, 1024, 512, 256]
    assert backend.arena.numel() == 2048


@pytest.mark.parametrize("name", OPS)
def test_failed_capture_leaks_its_pool(name: str) -> None:
    backend = RECORDING[name]()
    x, out = torch.ones(8, 64), torch.zeros(8, 64)
    intermediates: list[StorageWeakRef] = []

    def program(rows: int) -> None:
        value = x[:rows].exp()
        intermediates.append(StorageWeakRef(value.untyped_storage()))
        out[:rows].copy_(value if rows != 2 else value[value > 0].view(rows, 64))

    static = StaticSet({"x": x, "out": out})
    ladder = CapturedLadder("core", Ladder([1, 2, 4, 8]), program)
    with pytest.raises(CaptureError, match=r"^core\[2\]: aten\.index\.Tensor"):
        ladder.capture(backend, static, lambda: None)
    gc.collect()
    assert ladder.facts == {}
    assert all(storage.expired() for storage in intermediates)
    assert backend.arena.numel() == 2048, "no more than the largest bucket's"


@pytest.mark.parametrize("backend", OPS)
def test_every_replay_draws_the_same_random_numbers(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def draw(self: AtenOps | CpuOps, io: StepIO, rows: int) -> None:
        io.coda_token[:rows].copy_(torch.multinomial(io.logits[:rows].softmax(-1), 1)[:, 0])

    monkeypatch.setattr(OPS[backend], "draw", draw)
    with pytest.raises(CaptureError, match=r"^coda_full\[3\]: aten\.multinomial\.default at .*:\d+ draws"):
        make_executor(tiny_model(backend), backend)


@pytest.mark.parametrize("backend", ["eager", "recorded", "compiled"])
def test_greedy_text_changes_with_the_neighbours(backend: str) -> None:
    """At one bucket the neighbours' content changes no bit; their number changes at most the rounding."""
    model = tiny_model(backend)

    def run(neighbours: list[list[int]]) -> Driver:
        driver = Driver(make_executor(model, backend))
        driver.add(0, PROMPT[:2])
        for slot, prompt in enumerate(neighbours, 1):
            driver.add(slot, prompt)
        for depth in range(driver.depths):
            spans = [(slot, 0, len(r.tokens), depth) for slot, r in driver.requests.items()]
            coda = [(slot, len(r.tokens) - 1) for slot, r in driver.requests.items()] if depth == 2 else []
            driver.run(driver.make_step(spans, coda, bucket=8))
        return driver

    first, second, alone = run([[1, 2, 3], [4, 5, 6]]), run([[60, 61, 62], [63, 9, 9]]), run([])
    assert torch.equal(bits(first.logits[0, 1]), bits(second.logits[0, 1]))
    torch.testing.assert_close(
        first.logits[0, 1], alone.logits[0, 1], rtol=0, atol=0 if backend == "compiled" else 1e-5
    )
    for depth in range(first.depths):
        assert_same_bits(first.gates[0, 1, depth], second.gates[0, 1, depth], "gate")
