"""The asynchronous executor: the same bits, on a thread of its own, and errors that reach the caller."""

import gc
import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from tests.capture.driver import Driver, Step, make_executor, run_ahead, tiny_config, tiny_model
from tests.capture.faults import inject
from tests.capture.verify import assert_same_bits
from wavegraph.capture.executor import Executor
from wavegraph.capture.metadata import StepInputs
from wavegraph.capture.ring import HostSlot
from wavegraph.errors import CaptureError, EngineError
from wavegraph.model.io import Pools, StepIO
from wavegraph.model.ops.aten import AtenOps
from wavegraph.model.sampling import FEATURE_SAMPLER, encode_params
from wavegraph.model.weights import random_weights

PROMPTS = {0: [3, 9, 27, 11, 60, 2, 5], 2: [8, 8, 1], 1: [50, 40, 30, 20, 10, 5, 4, 3, 2, 1]}


@pytest.fixture
def executors() -> Iterator[Callable[..., Executor]]:
    """Makes executors that are closed after the test."""
    made: list[Executor] = []

    def make(backend: str = "eager", **options: int | bool) -> Executor:
        made.append(make_executor(tiny_model(backend), backend, **{"asynchronous": True, **options}))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for executor in made:
        executor.close()


def worker_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("wavegraph-executor")]


def scripted(executor: Executor) -> tuple[list[Step], list[list[int]]]:
    """All steps of a run of three requests, sampled and greedy, and the tokens of each."""
    driver = Driver(executor)
    driver.features = FEATURE_SAMPLER
    for slot, prompt in PROMPTS.items():
        sampled = encode_params(prompt_len=len(prompt), seed=slot, temperature=1.5)
        driver.add(slot, prompt, sampled if slot else ())
    steps: list[Step] = []
    driver.before_submit = steps.append
    tokens: list[list[int]] = []
    run = driver.run
    driver.run = lambda step: tokens.append(run(step)) or tokens[-1]  # type: ignore[method-assign, func-returns-value]
    driver.generate(6, chunk=3, budget=8)
    return steps, tokens


@pytest.mark.parametrize("backend", ["eager", "recorded"])
@pytest.mark.parametrize("ahead", [1, 4])
def test_equals_synchronous_bit_for_bit(executors: Callable[..., Executor], backend: str, ahead: int) -> None:
    """Steps are submitted up to ``ahead`` at a time before the first is polled."""
    synchronous = executors(backend, asynchronous=False)
    steps, expected = scripted(synchronous)
    assert len({token for row in expected for token in row}) > 3
    executor = executors(backend, max_in_flight=ahead)
    assert run_ahead(executor, steps, ahead) == expected
    for name in ("k", "v", "hidden", "gate"):
        assert_same_bits(getattr(executor.pools, name), getattr(synchronous.pools, name), name)
    for name in ("token_table", "page_table", "params"):
        assert_same_bits(getattr(executor.io, name), getattr(synchronous.io, name), name)
    assert executor.stats.core == synchronous.stats.core


class Gate:
    """Holds an executor's launches back until it is opened, and notes what each one saw."""

    def __init__(self, executor: Executor) -> None:
        self.opened = threading.Event()
        self.seen: list[tuple[str, int]] = []
        self._launch = executor._launch
        executor._launch = self._wait_and_launch  # type: ignore[method-assign]

    def _wait_and_launch(self, step: StepInputs, slot: HostSlot, parts: int) -> None:
        assert self.opened.wait(30)
        self.seen.append((threading.current_thread().name, torch.get_num_threads()))
        self._launch(step, slot, parts)


def test_the_host_goes_on_while_a_step_runs(executors: Callable[..., Executor]) -> None:
    executor = executors(max_in_flight=2)
    gate = Gate(executor)
    driver = Driver(executor)
    driver.add(0, PROMPTS[0])
    first = executor.submit(driver.make_step([(0, 0, 4, 0)]))
    second = executor.submit(driver.make_step([(0, 0, 4, 1)], [(0, 3)]))
    assert executor.poll(first, wait=False) is None
    assert executor.poll(second, wait=False) is None
    with pytest.raises(EngineError, match="steps in flight: 2 of 2"):
        executor.submit(Step())
    gate.opened.set()
    assert len(executor.poll(second).tokens) == 1
    output = executor.poll(first, wait=False)
    assert output is not None
    assert output.tokens == []
    assert {name for name, _ in gate.seen} == {"wavegraph-executor_0"}


@pytest.mark.parametrize("action", ["update_weights", "swap_out"])
def test_what_is_done_between_steps_waits_for_those_in_flight(executors: Callable[..., Executor], action: str) -> None:
    """The step that is under way neither sees the new weights nor is missing from the pages that leave."""
    executor, reference = executors(), Driver(executors(asynchronous=False))
    gate = Gate(executor)
    driver = Driver(executor)
    for each in (driver, reference):
        each.add(0, PROMPTS[0])
    reference.run(reference.make_step([(0, 0, 4, 0)]))
    executor.submit(driver.make_step([(0, 0, 4, 0)]))
    opener = threading.Timer(0.1, gate.opened.set)
    opener.start()
    if action == "swap_out":
        executor.swap_out(1, driver.requests[0].pages)
        found = executor.take_swapped(1)["hidden"][0]
    else:
        executor.update_weights(dict(random_weights(tiny_config(), 5)))
        found = executor.pools.hidden[driver.requests[0].pages[0]]
    opener.join()
    assert_same_bits(found, reference.executor.pools.hidden[reference.requests[0].pages[0]], "hidden")


def test_the_worker_uses_as_many_threads_as_the_caller(executors: Callable[..., Executor]) -> None:
    executor = executors()
    gate = Gate(executor)
    gate.opened.set()
    driver = Driver(executor)
    driver.add(0, PROMPTS[0])
    before = torch.get_num_threads()
    try:
        for count in (2, 1, 2):
            torch.set_num_threads(count)
            driver.run(driver.make_step([(0, 0, 4, 0)]))
    finally:
        torch.set_num_threads(before)
    assert [threads for _, threads in gate.seen] == [2, 1, 2]


def test_no_gradients_on_the_worker(executors: Callable[..., Executor], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    original = AtenOps.prepare

    def prepare(self: AtenOps, io: StepIO, pools: Pools, rows: int) -> None:
        seen.append(torch.is_grad_enabled())
        original(self, io, pools, rows)

    monkeypatch.setattr(AtenOps, "prepare", prepare)
    driver = Driver(executors())
    driver.add(0, PROMPTS[0])
    driver.run(driver.make_step([(0, 0, 4, 0)]))
    assert seen
    assert not any(seen)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_step_that_fails_before_launch(executors: Callable[..., Executor], asynchronous: bool) -> None:
    """Nothing of it is seen, its host memory is free again, and the next step goes on."""
    executor = executors(asynchronous=asynchronous, max_in_flight=2)
    inject(executor, before={1})
    driver = Driver(executor)
    driver.add(0, PROMPTS[0])
    steps = [driver.make_step([(0, 0, 4, depth)]) for depth in range(3)]
    first = executor.submit(steps[0])
    with pytest.raises(CaptureError, match="submission 1: injected refusal"):
        executor.submit(steps[1])
    second = executor.submit(steps[1])
    executor.poll(second)
    executor.poll(first)
    executor.poll(executor.submit(steps[2]))
    assert executor.stats.steps == 3


def test_step_that_fails_on_the_device(executors: Callable[..., Executor]) -> None:
    """Earlier steps keep their results; it is named to whoever polls it; all later ones fail."""
    executor = executors(max_in_flight=4)
    inject(executor, after={1})
    gate = Gate(executor)
    driver = Driver(executor)
    driver.add(0, PROMPTS[0])
    steps = [driver.make_step([(0, 0, 4, depth)], [(0, 3)]) for depth in range(3)]
    tickets = [executor.submit(step) for step in steps]
    gate.opened.set()
    with pytest.raises(EngineError, match=r"step 2: was not run, since step 1 failed after its launch"):
        executor.poll(tickets[2])
    for _ in range(2):
        with pytest.raises(EngineError, match="step 1: failed after its launch: injected device error"):
            executor.poll(tickets[1])
    assert len(executor.poll(tickets[0]).tokens) == 1
    assert len(gate.seen) == 2, "nothing was launched after the failure"
    for refused in (
        lambda: executor.submit(steps[0]), executor.synchronize, lambda: executor.swap_out(1, [0]),
        lambda: executor.update_weights({}),
    ):  # fmt: skip
        with pytest.raises(
            EngineError,
            match=r"executor: step 1 failed after its launch \(injected device error\)",
        ):
            refused()
    executor.close()


def test_errors_that_nobody_expects_are_fatal_too(executors: Callable[..., Executor]) -> None:
    executor = executors()

    def launch(*_: object) -> None:
        raise TypeError("a mistake in an operator")

    executor._launch = launch  # type: ignore[method-assign]
    driver = Driver(executor)
    driver.add(0, PROMPTS[0])
    step = driver.make_step([(0, 0, 4, 0)])
    ticket = executor.submit(step)
    with pytest.raises(TypeError, match="a mistake"):
        executor.poll(ticket)
    with pytest.raises(EngineError, match="step 0 failed after its launch"):
        executor.submit(step)


def test_close_lets_steps_end_and_leaves_no_thread(executors: Callable[..., Executor]) -> None:
    executor = executors()
    gate = Gate(executor)
    driver = Driver(executor)
    driver.add(0, PROMPTS[0])
    tickets = [executor.submit(driver.make_step([(0, 0, 4, depth)], [(0, 3)])) for depth in range(3)]
    assert worker_threads()
    gate.opened.set()
    executor.close()
    assert not worker_threads()
    assert all(len(executor.poll(ticket).tokens) == 1 for ticket in tickets)
    with pytest.raises(EngineError, match="closed"):
        executor.submit(Step())
    executor.close()


def test_executor_that_is_dropped_leaves_no_thread() -> None:
    driver = Driver(make_executor(tiny_model(), "eager", asynchronous=True))
    driver.add(0, PROMPTS[0])
    driver.run(driver.make_step([(0, 0, 4, 0)]))
    threads = worker_threads()
    del driver
    gc.collect()
    for thread in threads:
        thread.join(10)
    assert not worker_threads()
