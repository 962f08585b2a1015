"""One engine for all variants of a benchmark: weights, pools and recorded programs are shared, the scheduler is new."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from time import perf_counter
from typing import Any

from wavegraph.bench.cost import CostMeter
from wavegraph.bench.shape import Shape
from wavegraph.config import EngineConfig
from wavegraph.engine.engine import Engine
from wavegraph.model.weights import model_from_tensors
from wavegraph.outputs import RequestOutput
from wavegraph.sampling import SamplingParams
from wavegraph.scheduler.config import SchedulerConfig
from wavegraph.scheduler.scheduler import Scheduler
from wavegraph.startup.backend_choice import make_runner
from wavegraph.startup.sizing import derive
from wavegraph.study.latency import Timeline
from wavegraph.study.measure import machine_facts
from wavegraph.study.simulate import SimulationResult, simulate
from wavegraph.study.workload import Workload


@dataclass(frozen=True, slots=True)
class Run:
    """What a run did: seconds from its first request to the last result, steps whose result was taken, and rows.

    ``outputs`` are of finished requests, by request id; times of ``timelines`` are seconds from the start of the run.
    """

    seconds: float
    steps: int
    rows: int
    padding_rows: int
    outputs: dict[str, RequestOutput]
    timelines: dict[str, Timeline]


class SharedEngine:
    """A random model of ``shape`` with ``depths`` loops in an engine for ``seqs`` requests of up to ``longest`` tokens.

    ``budget`` is the most rows of a step; more than these requests can have are not recorded. Schedulers decide by the
    assumed cost, so that what they do is the same on every machine and in every run; predictions are priced by what was
    measured, with spans of ``span_rows`` rows, as most of the work has.
    """

    def __init__(
        self, shape: Shape, depths: int, longest: int, budget: int, seqs: int, backend: str, span_rows: int
    ) -> None:
        self.shape, self.depths, self._longest = shape, depths, longest
        self._model = shape.config(depths=depths, max_len=longest)
        runner = make_runner(backend, shape.torch_dtype)
        self._fixed: dict[str, Any] = {
            "max_num_batched_tokens": min(budget, seqs * depths * longest),
            "max_num_seqs": seqs,
            "max_model_len": longest,
            "page_size": shape.page_size,
            "num_pages": seqs * -(-longest // shape.page_size),
            "prefix_cache": False,
        }
        model = model_from_tensors(self._model, shape.weights(self._model), ops=runner.ops, dtype=shape.torch_dtype)
        options = EngineConfig(**self._fixed)
        sizes = derive(options, self._model, shape.torch_dtype)
        self._run_ahead = options.run_ahead_steps
        self.engine = Engine(model, sizes, backend=runner.backend, run_ahead=self._run_ahead)
        self._meter = CostMeter(self.engine, span_rows)
        self._facts = {"backend": runner.backend.name, "isa": getattr(runner.ops, "isa", None)}

    def variant(self, **options: Any) -> SchedulerConfig:
        """The scheduler's part of `EngineConfig` options, which may not touch limits."""
        return derive(EngineConfig(**self._fixed, **options), self._model, self.shape.torch_dtype).scheduler

    def use(self, config: SchedulerConfig) -> None:
        """A new scheduler for the engine, all of whose requests have ended."""
        for _ in range(self._run_ahead):
            self.engine.step()  # takes the results of steps that were planned for requests that ended meanwhile
        sizes = self.engine.sizes
        self.engine.scheduler = Scheduler(config, sizes.ladder, sizes.coda_ladder)

    def measure_cost(self) -> None:
        """Measure what steps cost once more, between runs."""
        self.use(self.engine.scheduler.config)
        self._meter.visit()

    def run(self, config: SchedulerConfig, workload: Workload, params: SamplingParams | None = None) -> Run:
        """Serve all requests of ``workload`` as if they came at once, with random prompts, the same in every run.

        ``params`` are the exits and so on of all of them.
        """
        self.use(config)
        prompts = self.prompts([each.prompt_tokens for each in workload.requests])
        watch = Watch(self.engine)
        for index, (prompt, request) in enumerate(zip(prompts, workload.requests, strict=True)):
            watch.add(str(index), prompt, request.output_tokens, params)
        while self.engine.has_unfinished:
            watch.step()
        return watch.result()

    def predict(self, config: SchedulerConfig, workload: Workload, measured_ms: float) -> dict[str, float]:
        """What the cost model says to the same: ``predicted_ms``, and ``error``, relative to what was measured."""
        predicted = self._simulate(config, workload).duration * 1e3
        return {"predicted_ms": predicted, "error": predicted / measured_ms - 1}

    def _simulate(self, config: SchedulerConfig, workload: Workload) -> SimulationResult:
        at_once = Workload(workload.name, tuple(replace(each, arrival=0.0) for each in workload.requests))
        sizes = self.engine.sizes
        return simulate(
            at_once,
            config,
            ladder=sizes.ladder,
            coda_ladder=sizes.coda_ladder,
            prices=self._meter.cost(),
            run_ahead=self._run_ahead,
        )

    def prompts(self, lengths: Sequence[int]) -> list[list[int]]:
        """Random token ids, one prompt a length."""
        draw = Random(0)
        return [draw.choices(range(self._model.vocab_size), k=length) for length in lengths]

    @property
    def bit_invariant(self) -> bool:
        """Whether no schedule may change a bit."""
        return self._facts["backend"] == "compiled"

    def facts(self) -> dict[str, Any]:
        """Machine, versions, commit, backend and shape, and the cost that was measured, for the result."""
        shape = {name: getattr(self.shape, name) for name in self.shape.__slots__ if name not in ("context", "chunk")}
        limits = {name: self._fixed[name] for name in ("max_num_batched_tokens", "max_num_seqs")}
        cost = self._meter.cost().to_dict()
        return {**machine_facts(), **self._facts, "shape": shape, "depths": self.depths, **limits, "cost": cost}

    def close(self) -> None:
        """Free the engine."""
        self.engine.close()


class Watch:
    """Runs an engine and notes when each token is seen."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._stats = replace(engine.scheduler.stats)
        self._started = perf_counter()
        self._steps = 0
        self.outputs: dict[str, RequestOutput] = {}
        self.timelines: dict[str, Timeline] = {}

    @property
    def seconds(self) -> float:
        """Since the start."""
        return perf_counter() - self._started

    def add(self, name: str, prompt: list[int], output_tokens: int, params: SamplingParams | None = None) -> None:
        """A request arrives."""
        params = replace(params or SamplingParams(), max_tokens=output_tokens, ignore_eos=True)
        self.timelines[name] = Timeline(self.seconds)
        self._engine.add_request(name, prompt, params)

    def step(self) -> list[RequestOutput]:
        """Take the result of one step; returns the requests that it finished."""
        self._steps += 1
        outputs = self._engine.step()
        now = self.seconds
        for output in outputs:
            self.timelines[output.request_id].tokens.append(now)
        finished = [output for output in outputs if output.finished]
        self.outputs |= {output.request_id: output for output in finished}
        return finished

    def result(self) -> Run:
        """What was done since the start."""
        seconds, now, then = self.seconds, self._engine.scheduler.stats, self._stats
        return Run(
            seconds,
            self._steps,
            now.rows - then.rows,
            now.padding_rows - then.padding_rows,
            self.outputs,
            self.timelines,
        )
