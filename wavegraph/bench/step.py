"""What a step costs the host when the device costs nothing: the engine's programs are recorded as no-ops."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from wavegraph.bench.shape import Shape
from wavegraph.capture.backends.base import Backend, Program, Recording
from wavegraph.capture.static import StaticSet
from wavegraph.config import EngineConfig
from wavegraph.engine.engine import Engine
from wavegraph.model.ops.aten import AtenOps
from wavegraph.model.weights import model_from_tensors
from wavegraph.sampling import SamplingParams
from wavegraph.scheduler.plan import StepPlan
from wavegraph.startup.sizing import derive
from wavegraph.study.measure import Times, machine_facts

SHAPE = Shape(hidden=16, layers=24, heads=1, head_dim=16, inner=16, vocab=256, dtype="float32")
"""Small pools, but as many tensors as Ouro-1.4B: each step looks whether they are in their places."""

DEPTHS = 4
ROUND = 20
"""Steps of a variant before it is the next one's turn."""

PARTS = ("plan", "pack", "submit", "poll", "apply")


class NullBackend(Backend):
    """Records programs as no-ops."""

    name = "null"

    def _record(self, program: Program, static: StaticSet, name: str) -> Recording:
        return Recording(lambda: None)


def bench_step(spans: Sequence[int], waiting: Sequence[int], steps: int, asynchronous: bool) -> dict[str, Any]:
    """Microseconds of `Engine.step`, for steps of each number of ``spans`` with each number of ``waiting`` requests.

    Twice as many requests as spans decode, one row each, for ``steps`` steps whole (wall time, and CPU time of the
    engine's thread) and as many of which the parts are timed apart, whose clocks would weigh on the whole. ``pack`` is
    a second packing of each plan, ``submit`` holds the first. ``asynchronous`` plans a step ahead while a thread runs
    the no-ops.
    """
    variants = [_Variant(count, queue, steps, asynchronous) for count in spans for queue in waiting]
    rounds = max(1, steps // ROUND)
    for variant in variants:
        variant.warm_up()
    for _ in range(rounds):
        for variant in variants:
            variant.whole_steps()
    for variant in variants:
        variant.time_parts()
    for _ in range(rounds):
        for variant in variants:
            variant.steps(ROUND)
    table = [variant.result() for variant in variants]
    for variant in variants:
        variant.engine.close()
    return {**machine_facts(), "benchmark": "step", "asynchronous": asynchronous, "steps": table}


class _Variant:
    """An engine of no-ops whose steps hold ``spans`` rows of as many requests, and what its steps took, in seconds."""

    def __init__(self, spans: int, waiting: int, steps: int, asynchronous: bool) -> None:
        self.spans, self.waiting = spans, waiting
        running = 2 * spans
        self._warm_up = 4 * DEPTHS * running // spans + ROUND
        tokens = (2 * max(steps, ROUND) + self._warm_up) * spans // (DEPTHS * running) + 8
        self.engine = _engine(running, spans, tokens, asynchronous)
        params = SamplingParams(max_tokens=tokens - 1, ignore_eos=True)
        for index in range(running + waiting):
            self.engine.add_request(str(index), [1], params)
        self._times: dict[str, list[float]] = {name: [] for name in ("step_wall", "step_cpu", *PARTS)}

    def warm_up(self) -> None:
        """All requests decode, and caches are warm."""
        self.steps(self._warm_up)

    def steps(self, count: int) -> None:
        """Steps, not timed as a whole."""
        for _ in range(count):
            self.engine.step()

    def whole_steps(self) -> None:
        """A round of steps, timed as a whole."""
        for _ in range(ROUND):
            started, busy = time.perf_counter(), time.thread_time()
            self.engine.step()
            self._times["step_cpu"].append(time.thread_time() - busy)
            self._times["step_wall"].append(time.perf_counter() - started)

    def time_parts(self) -> None:
        """From now on the parts of steps are timed."""
        engine, times = self.engine, self._times
        layout = engine.sizes.limits.layout()
        buffer = np.empty(layout.size, dtype=np.int32)

        def pack(plan: StepPlan) -> None:
            parts = layout.parts(plan)
            for part in range(parts):
                layout.pack(plan, buffer, part, parts)

        submit, pack_timed = engine.executor.submit, _timed(pack, times["pack"])

        def pack_and_submit(plan: StepPlan) -> Any:
            pack_timed(plan)
            return submit_timed(plan)

        submit_timed = _timed(submit, times["submit"])
        engine.executor.submit = pack_and_submit  # type: ignore[method-assign, assignment]
        engine.scheduler.plan = _timed(engine.scheduler.plan, times["plan"])  # type: ignore[method-assign]
        engine.executor.poll = _timed(engine.executor.poll, times["poll"])  # type: ignore[method-assign]
        engine.scheduler.apply = _timed(engine.scheduler.apply, times["apply"])  # type: ignore[method-assign]

    def result(self) -> dict[str, Any]:
        """Microseconds: medians and spread."""
        stats = self.engine.stats()
        facts = {"spans": self.spans, "running": stats.running, "waiting": stats.waiting}
        return facts | {
            f"{name}_us": Times.of([value * 1e6 for value in values]).to_dict() for name, values in self._times.items()
        }


def _timed(call: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    """``call``, the CPU seconds of this thread in it appended to ``seconds``."""

    def measured(*arguments: Any, **named: Any) -> Any:
        started = time.thread_time()
        try:
            return call(*arguments, **named)
        finally:
            seconds.append(time.thread_time() - started)

    return measured


def _engine(running: int, spans: int, tokens: int, asynchronous: bool) -> Engine:
    config = SHAPE.config(depths=DEPTHS, max_len=tokens)
    model = model_from_tensors(config, SHAPE.weights(config), ops=AtenOps(), dtype=torch.float32, max_model_len=tokens)
    options = EngineConfig(
        max_num_seqs=running,
        max_num_batched_tokens=spans,
        max_model_len=tokens,
        num_pages=running * -(-tokens // 16),
        prefix_cache=False,
        async_scheduling=asynchronous,
    )
    sizes = derive(options, config, model.dtype)
    return Engine(model, sizes, backend=NullBackend(), run_ahead=options.run_ahead_steps)
