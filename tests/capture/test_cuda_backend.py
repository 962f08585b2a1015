"""The `cuda` backend by a thin fake of CUDA: call order, what waits for what, failures, and that all is given back."""

import gc
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.capture.driver import Driver, make_executor, run_ahead, tiny_config, tiny_model
from tests.capture.fake_cuda import GRAPH_BYTES, TOTAL, FakeCuda, FakeDevice, fake_cuda
from tests.capture.test_async import scripted
from tests.capture.verify import assert_same_bits
from wavegraph.capture.backends.cuda import CudaBackend
from wavegraph.capture.executor import Executor
from wavegraph.capture.static import StaticSet
from wavegraph.errors import CaptureError, EngineError
from wavegraph.model.io import Pools, StepIO
from wavegraph.model.ops.aten import AtenOps
from wavegraph.model.weights import random_weights

__all__ = ["fake_cuda"]

PROMPT = [3, 9, 27, 11, 60, 2, 5]
ONE_CAPTURE = ["stream.synchronize", "begin (0, 7) thread_local", "end", "instantiate", "upload 99"]


def captured(**options: int) -> tuple[Executor, CudaBackend]:
    backend = CudaBackend(FakeDevice())
    return make_executor(tiny_model(), backend, **options), backend


def run_prompt(driver: Driver, slot: int = 0) -> None:
    driver.add(slot, PROMPT)
    for depth in range(driver.depths):
        driver.run(driver.make_step([(slot, 0, 7, depth)]))


# -- capture -----------------------------------------------------------------------------------------------


def test_every_bucket_is_captured_once_the_largest_first(fake_cuda: FakeCuda) -> None:
    executor, backend = captured()
    names = [f"core[{rows}]" for rows in (8, 4, 2, 1)]
    names += [f"{program}[{rows}]" for program in ("coda", "coda_full", "copy_exits") for rows in (3, 2, 1)]
    assert list(backend._graphs) == [*names, "tables[1]"]
    log = [call for call in fake_cuda.log if call not in ("synchronize", "empty_cache")]
    assert log == ["pool"] + [*ONE_CAPTURE, "stream.synchronize"] * (len(names) + 1)
    assert fake_cuda.log[1:3] == ["synchronize", "empty_cache"], "other streams have ended before the first capture"
    assert fake_cuda.log[-2:] == ["synchronize", "empty_cache"], "what the warm-ups used is given back"
    assert all(facts.bytes == GRAPH_BYTES and facts.nodes > 0 for facts in executor.core.facts.values())


def test_programs_run_twice_before_their_capture_and_no_garbage_is_collected_within(fake_cuda: FakeCuda) -> None:
    backend = CudaBackend(FakeDevice())
    seen: list[tuple[bool, bool]] = []
    x = torch.zeros(3)

    def program() -> None:
        seen.append((fake_cuda.capturing is not None, gc.isenabled()))
        x.add_(1)

    assert gc.isenabled()
    frozen = gc.get_freeze_count()
    with backend.session():
        recorded = backend.capture(program, StaticSet({"x": x}), "p")
    assert seen == [(False, False), (False, False), (True, False)]
    assert gc.isenabled()
    assert gc.get_freeze_count() == frozen
    before = float(x[0])
    recorded.replay()
    assert float(x[0]) == before, "a replay only submits"
    backend.device.synchronize()
    assert float(x[0]) == before + 1
    assert len(seen) == 3


def test_garbage_collection_that_was_off_stays_off(fake_cuda: FakeCuda) -> None:
    gc.disable()
    try:
        with CudaBackend(FakeDevice()).session():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_capture_is_forbidden_after_start(fake_cuda: FakeCuda) -> None:
    _, backend = captured()
    log = list(fake_cuda.log)
    with pytest.raises(CaptureError, match=r"core\[16\]: capture is forbidden after start-up"):
        backend.capture(lambda: None, StaticSet({}), "core[16]")
    assert fake_cuda.log == log


def test_graphs_can_be_looked_into(fake_cuda: FakeCuda, tmp_path: Path) -> None:
    executor, backend = captured()
    nodes = backend.nodes("core[8]")
    assert len(nodes) == executor.core.facts[8].nodes
    assert {node.kind for node in nodes} == {"KERNEL"}
    assert "aten::mm" in {node.kernel for node in nodes}
    backend.write_dot("core[8]", tmp_path / "core.dot")
    assert (tmp_path / "core.dot").read_text().startswith("digraph")


# -- steps -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ahead", [1, 4])
def test_steps_equal_those_of_recorded_bit_for_bit(fake_cuda: FakeCuda, ahead: int) -> None:
    """Up to ``ahead`` steps are in flight, and nothing on the device runs before something waits for it."""
    expected_executor = make_executor(tiny_model(), "recorded")
    steps, expected = scripted(expected_executor)
    executor, _ = captured(max_in_flight=ahead)
    assert run_ahead(executor, steps, ahead) == expected
    for name in ("k", "v", "hidden", "gate"):
        assert_same_bits(getattr(executor.pools, name), getattr(expected_executor.pools, name), name)


def test_a_device_that_queues_needs_no_worker_thread(fake_cuda: FakeCuda) -> None:
    executor, _ = captured(asynchronous=True)
    assert executor._worker is None


def test_poll_without_waiting_asks_the_event(fake_cuda: FakeCuda) -> None:
    executor, _ = captured()
    driver = Driver(executor)
    driver.add(0, PROMPT)
    ticket = executor.submit(driver.make_step([(0, 0, 7, 0)]))
    assert executor.poll(ticket, wait=False) is None
    fake_cuda.run()
    assert executor.poll(ticket, wait=False) is not None


def test_results_and_metadata_are_not_touched_before_their_event(fake_cuda: FakeCuda) -> None:
    """A slot's event is recorded behind the copy of its results, and waited for before they are read."""
    executor, _ = captured()
    driver = Driver(executor)
    driver.add(0, PROMPT)
    step = driver.make_step([(0, 0, 7, 0)])
    del fake_cuda.log[:]
    ticket = executor.submit(step)
    assert fake_cuda.log == ["replay", "record"]
    executor.poll(ticket)
    assert fake_cuda.log == ["replay", "record", "event.synchronize"]


def test_pages_that_leave_are_copied_before_others_use_them(fake_cuda: FakeCuda) -> None:
    """A request goes to the host, another takes its pages in the same step, and the first comes back elsewhere."""

    def run(executor: Executor) -> tuple[dict[str, Tensor], list[int]]:
        driver = Driver(executor)
        run_prompt(driver)
        request = driver.requests.pop(0)
        driver.free = request.pages + driver.free
        driver.add(1, PROMPT[::-1])
        step = driver.make_step([(1, 0, 7, 0)])
        step.swap_out.append((5, request.pages))
        driver.run(step)
        driver.requests[0] = request
        step = driver.make_step([(1, 0, 7, 1)])
        driver.move_in(step, 0, 5, [20, 21])
        driver.run(step)
        tokens = driver.run(driver.make_step([], [(0, 6)]))
        executor.swap_out(9, [20, 21])
        return executor.take_swapped(9), tokens

    expected, expected_tokens = run(make_executor(tiny_model(), "recorded"))
    swapped, tokens = run(captured()[0])
    assert tokens == expected_tokens
    for name, tensor in expected.items():
        assert_same_bits(swapped[name], tensor, name)


def test_new_weights_are_there_for_the_next_step(fake_cuda: FakeCuda) -> None:
    executor, _ = captured()
    other = dict(random_weights(tiny_config(), 5))
    executor.update_weights(other)
    assert not fake_cuda.queue
    expected = make_executor(tiny_model(seed=5), "recorded")
    drivers = [Driver(executor), Driver(expected)]
    for driver in drivers:
        run_prompt(driver)
    assert_same_bits(executor.pools.hidden, expected.pools.hidden, "hidden")


def test_check_looks_over_replays_on_the_device(fake_cuda: FakeCuda) -> None:
    executor = make_executor(tiny_model(), CudaBackend(FakeDevice()), check=True)
    run_prompt(Driver(executor))
    executor.synchronize()


# -- failures and release ----------------------------------------------------------------------------------


def all_given_back(fake: FakeCuda) -> bool:
    gc.collect()
    assert gc.isenabled()
    return fake.free == TOTAL and not fake.routed and not any(graph.ready or graph.ended for graph in fake.graphs)


def test_close_gives_everything_back(fake_cuda: FakeCuda) -> None:
    executor, backend = captured()
    assert fake_cuda.free < TOTAL
    executor.close()
    assert all_given_back(fake_cuda)
    assert fake_cuda.log[-2:] == ["synchronize", "empty_cache"]
    executor.close()
    assert not backend._graphs


def test_close_waits_for_replays_in_flight(fake_cuda: FakeCuda) -> None:
    executor, _ = captured()
    driver = Driver(executor)
    driver.add(0, PROMPT)
    ticket = executor.submit(driver.make_step([(0, 0, 7, 0)]))
    executor.close()
    executor.poll(ticket)
    with pytest.raises(EngineError, match="executor: closed"):
        executor.submit(driver.make_step([(0, 0, 7, 1)]))


def sync_in_core(monkeypatch: pytest.MonkeyPatch, fake: FakeCuda) -> None:
    original = AtenOps.prepare

    def prepare(self: AtenOps, io: StepIO, pools: Pools, rows: int) -> None:
        original(self, io, pools, (int(io.header[1]) if rows == 2 else 0) or rows)

    monkeypatch.setattr(AtenOps, "prepare", prepare)


def warm_up_fails(monkeypatch: pytest.MonkeyPatch, fake: FakeCuda) -> None:
    def score(self: AtenOps, io: StepIO, rows: int) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB")

    monkeypatch.setattr(AtenOps, "score", score)


def call_fails(name: str) -> Callable[[pytest.MonkeyPatch, FakeCuda], None]:
    return lambda monkeypatch, fake: fake.fail.update({name: RuntimeError(f"CUDA error: {name}\nmore words")})


@pytest.mark.parametrize("leaky", [False, True])
@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (sync_in_core, r"core\[2\]: .*operation not permitted when stream is capturing\)$"),
        (warm_up_fails, r"coda_full\[3\]: .*out of memory"),
        (call_fails("begin (0, 7) thread_local"), r"core\[8\]: cannot be captured .*\(CUDA error: begin"),
        (call_fails("invalidated"), r"core\[8\]: .*CUDA error: invalidated\)$"),
        (call_fails("instantiate"), r"core\[8\]: .*CUDA error: instantiate\)$"),
        (call_fails("upload 99"), r"core\[8\]: .*CUDA error: upload 99\)$"),
    ],
)
def test_a_failed_capture_names_its_bucket_and_gives_everything_back(
    fake_cuda: FakeCuda,
    monkeypatch: pytest.MonkeyPatch,
    break_it: Callable[[pytest.MonkeyPatch, FakeCuda], None],
    message: str,
    leaky: bool,
) -> None:
    fake_cuda.leaky = leaky
    break_it(monkeypatch, fake_cuda)
    with pytest.raises(CaptureError, match=message):
        captured()
    assert all_given_back(fake_cuda)
    assert fake_cuda.capturing is None
    assert fake_cuda.log.count("release_pool") == (leaky and "invalidated" in fake_cuda.fail)


def test_an_error_of_the_program_itself_passes_and_gives_everything_back(
    fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    def score(self: AtenOps, io: StepIO, rows: int) -> None:
        raise TypeError("no such argument")

    monkeypatch.setattr(AtenOps, "score", score)
    with pytest.raises(TypeError, match="no such argument"):
        captured()
    assert all_given_back(fake_cuda)


@pytest.mark.parametrize("call", ["replay", "record", "event.synchronize", "query"])
def test_a_device_that_fails_ends_the_executor(
    fake_cuda: FakeCuda, caplog: pytest.LogCaptureFixture, call: str
) -> None:
    executor, _ = captured()
    driver = Driver(executor)
    driver.add(0, PROMPT)
    step = driver.make_step([(0, 0, 7, 0)])
    fake_cuda.fail[call] = RuntimeError("CUDA error: an illegal memory access was encountered")
    with pytest.raises(EngineError, match="step 0: failed after its launch: CUDA error: an illegal memory access"):
        executor.poll(executor.submit(step), wait=call != "query")
    for use in (lambda: executor.submit(step), executor.synchronize, lambda: executor.swap_out(1, [0])):
        with pytest.raises(EngineError, match=r"executor: step 0 failed after its launch \(CUDA .*\); build a new"):
            use()
    fake_cuda.fail["stream.synchronize"] = RuntimeError("CUDA error: sticky")
    with caplog.at_level(logging.WARNING):
        executor.close()
    assert "close: the device gives nothing back (CUDA error: sticky)" in caplog.text


def test_a_failure_is_found_by_synchronize_too(fake_cuda: FakeCuda) -> None:
    executor, _ = captured()
    driver = Driver(executor)
    run_prompt(driver)
    fake_cuda.fail["stream.synchronize"] = RuntimeError("CUDA error: unspecified launch failure")
    with pytest.raises(EngineError, match="step 2: failed after its launch: CUDA error: unspecified"):
        executor.synchronize()
    with pytest.raises(EngineError, match="build a new executor"):
        executor.submit(driver.make_step([], [(0, 6)]))
