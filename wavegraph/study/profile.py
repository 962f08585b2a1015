"""Profiles a model's buckets on this machine, and makes of it a ladder for a workload."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from wavegraph.buckets.cost import CostModel
from wavegraph.buckets.ladder import Ladder
from wavegraph.buckets.profile import Profile, candidate_rows, points_of, profile
from wavegraph.buckets.robust import RobustLadder, optimise_robust
from wavegraph.buckets.rules import compare
from wavegraph.buckets.samples import Samples
from wavegraph.config import EngineConfig
from wavegraph.engine.engine import Engine, Progress
from wavegraph.engine.sizes import Sizes
from wavegraph.model.config import OuroConfig
from wavegraph.model.loading import checkpoint_dtype, load_model, resolve_checkpoint
from wavegraph.model.weights import Model
from wavegraph.scheduler.plan import StepPlan
from wavegraph.startup.backend_choice import AUTO, Runner, check_backend, make_runner
from wavegraph.startup.sizing import derive
from wavegraph.study.bucket_probe import SPAN_ROWS, BucketProbe
from wavegraph.study.measure import machine_facts
from wavegraph.study.simulate import attended_positions, simulate
from wavegraph.study.workload import Workload

CONTEXTS = (64, 256, 1024)
"""Contexts that are measured where none are named: those that the model reaches."""

MAX_STEPS = 100_000

Load = Callable[[Runner, int, Progress | None], Model]
"""Makes a model for a runner and a number of positions, and says how far it is."""


@dataclass(frozen=True, slots=True)
class Budget:
    """What a ladder may take: buckets, bytes and seconds of recording; None is no limit."""

    max_graphs: int = 12
    max_bytes: int | None = None
    max_capture_seconds: float | None = None

    def without(self, rows: int, top: int, cost: CostModel) -> "Budget | None":
        """What a bucket of ``rows`` rows leaves for others; None if that is not even the top bucket's part."""
        graphs = self.max_graphs - 1
        size = None if self.max_bytes is None else self.max_bytes - cost.core.bytes(rows)
        seconds = None if self.max_capture_seconds is None else self.max_capture_seconds - cost.core.capture(rows)
        if graphs < 1 or (size is not None and size < cost.core.bytes(top)):
            return None
        if seconds is not None and seconds < cost.core.capture(top):
            return None
        return Budget(graphs, size, seconds)


@dataclass(frozen=True, slots=True)
class Subject:
    """What is profiled: a model's shape, how to ``load`` it, and what runs it.

    ``config`` says how steps are planned; its row budget is the largest batch. ``contexts`` and ``candidates`` ascend.
    """

    load: Callable[[Progress | None], Model]
    shape: OuroConfig
    dtype: torch.dtype
    runner: Runner
    config: EngineConfig
    contexts: tuple[int, ...]
    candidates: tuple[int, ...]

    @classmethod
    def find(
        cls,
        path: str | Path,
        config: EngineConfig,
        *,
        dtype: str = "auto",
        backend: str = AUTO,
        contexts: Sequence[int] | None = None,
        candidates: Sequence[int] | None = None,
        on_build: Progress | None = None,
    ) -> "Subject":
        """A checkpoint, looked at without reading weights; the rest as for `of`. Raises `CheckpointError` too."""
        check_backend(backend)
        folder = resolve_checkpoint(path)
        shape = OuroConfig.from_file(folder)
        torch_dtype = checkpoint_dtype(folder, shape, dtype)

        def load(runner: Runner, longest: int, on_load: Progress | None) -> Model:
            name = str(torch_dtype).removeprefix("torch.")
            return load_model(folder, ops=runner.ops, dtype=name, max_model_len=longest, progress=on_load)

        return cls.of(load, shape, torch_dtype, config, backend, contexts, candidates, on_build)

    @classmethod
    def of(
        cls,
        load: Load,
        shape: OuroConfig,
        dtype: torch.dtype,
        config: EngineConfig,
        backend: str = AUTO,
        contexts: Sequence[int] | None = None,
        candidates: Sequence[int] | None = None,
        on_build: Progress | None = None,
    ) -> "Subject":
        """Any model. Without ``candidates``, `candidate_rows`; without ``contexts``, those of `CONTEXTS` it reaches.

        The largest batch is always a candidate. Raises `ConfigError` for what cannot be profiled.
        """
        limit, top = shape.max_position_embeddings, config.row_budget
        if contexts is None:
            contexts = [each for each in CONTEXTS if each <= limit] or [limit]
        sizes = Ladder([*(candidates if candidates is not None else candidate_rows(top)), top]).sizes
        points_of(sizes, [1], contexts)
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        runner = make_runner(backend, dtype, on_build)
        return cls(
            partial(load, runner, max(contexts)), shape, dtype, runner, config, tuple(sorted(set(contexts))), sizes
        )

    def sizes(self) -> Sizes:
        """Limits of an engine that records every candidate, and whose pool holds the longest context in each span."""
        top, page_size = self.config.row_budget, self.config.page_size
        spans, longest = -(-top // SPAN_ROWS), max(self.contexts)
        options = EngineConfig(
            buckets=self.candidates,
            max_num_batched_tokens=top,
            max_num_seqs=max(spans, self.config.max_num_seqs),
            max_model_len=longest,
            page_size=page_size,
            num_pages=spans * -(-longest // page_size),
            prefix_cache=False,
            async_scheduling=False,
        )
        sizes = derive(options, self.shape, self.dtype, dense_attention=self.runner.ops.dense_attention)
        return replace(sizes, coda_ladder=Ladder(candidate_rows(sizes.coda_ladder.max)))

    def fingerprint(self) -> dict[str, Any]:
        """All that a sample depends on. JSON types."""
        shape = {f"model.{name}": value for name, value in asdict(self.shape).items()}
        facts = {name: value for name, value in machine_facts().items() if name not in ("commit", "python")}
        return {
            **shape,
            "dtype": str(self.dtype).removeprefix("torch."),
            "backend": self.runner.backend.name,
            "isa": getattr(self.runner.ops, "isa", None),
            "page_size": self.config.page_size,
            "span_rows": SPAN_ROWS,
            **facts,
        }

    def measure(
        self,
        samples: Samples,
        *,
        on_load: Progress | None = None,
        on_capture: Progress | None = None,
        on_measure: Progress | None = None,
    ) -> Profile:
        """Measure what ``samples`` lacks of the candidates."""
        sizes = self.sizes()

        def connect() -> BucketProbe:
            engine = Engine(self.load(on_load), sizes, backend=self.runner.backend, progress=on_capture)
            return BucketProbe(engine, self.contexts)

        points = points_of(sizes.ladder.sizes, sizes.coda_ladder.sizes, self.contexts)
        facts = self.fingerprint()
        words = f"{facts['cpu']}, {facts['threads']} threads, {facts['backend']} ({facts['isa']}), {facts['dtype']}"
        return profile(connect, points, samples, source=words, progress=on_measure)

    def schedule(
        self, workload: Workload, cost: CostModel, ladder: Ladder | None = None, on_simulate: Progress | None = None
    ) -> "Schedule":
        """The steps that the scheduler makes of a workload, on virtual time; without a ``ladder`` at any row count.

        Requests are cut to the model's length, and share no prefix; a workload of more than `MAX_STEPS` steps is cut
        there.
        """
        config = replace(self.config, prefix_cache=False)
        sizes = derive(config, self.shape, self.dtype, dense_attention=self.runner.ops.dense_attention)
        rows: list[int] = []
        run, seconds = 0, 0.0

        def note(plan: StepPlan) -> None:
            nonlocal run, seconds
            rows.extend([plan.rows] * bool(plan.rows))
            run += plan.bucket
            seconds += cost.step_seconds(plan.bucket, attended_positions(plan), plan.coda_bucket)

        simulate(
            workload.limited(sizes.scheduler.max_model_len),
            sizes.scheduler,
            ladder=ladder,
            coda_ladder=sizes.coda_ladder if ladder is not None else None,
            cost=cost,
            run_ahead=self.config.run_ahead_steps,
            max_steps=MAX_STEPS,
            progress=on_simulate,
            on_plan=note,
        )
        return Schedule(tuple(rows), seconds, 1 - sum(rows) / run if run else 0.0)

    def weights(self) -> dict[str, int]:
        """Bytes of the layers' products that a replay of CORE reads, and floating-point operations of a row."""
        shape = self.shape
        attention = shape.hidden_size * (2 * shape.q_size + 2 * shape.kv_size)
        count = shape.num_hidden_layers * (attention + 3 * shape.hidden_size * shape.intermediate_size)
        return {"weight_bytes": count * self.dtype.itemsize, "row_flops": 2 * count}


@dataclass(frozen=True, slots=True)
class Schedule:
    """Steps of a workload: rows of each, predicted seconds of all, and the share of replayed rows that is padding."""

    rows: tuple[int, ...]
    seconds: float
    padding: float


def recommend(
    subject: Subject, wanted: Sequence[int], cost: CostModel, workload: Workload, budget: Budget
) -> RobustLadder:
    """The ladder for steps that want so many rows each: `optimise_robust`'s, or that with the fastest bucket added.

    The optimiser takes every step to replay one bucket. The scheduler may split a step, so the bucket with the most
    rows a second can be worth its place even if no step wants it: it gets one if the workload is then predicted to
    take less time.
    """
    top = subject.config.row_budget
    plain = optimise_robust(wanted, cost, max_rows=top, **asdict(budget))
    fastest = max(range(1, top + 1), key=lambda rows: rows / cost.step_seconds(rows))
    rest = budget.without(fastest, top, cost)
    if fastest in plain.ladder.sizes or rest is None:
        return plain
    other = optimise_robust(wanted, cost, max_rows=top, **asdict(rest))
    other = replace(other, ladder=Ladder([*other.ladder.sizes, fastest]))
    return min((plain, other), key=lambda found: subject.schedule(workload, cost, found.ladder).seconds)


def report(
    subject: Subject,
    measured: Profile,
    workload: Workload,
    budget: Budget,
    on_simulate: Progress | None = None,
) -> dict[str, Any]:
    """All that was found, JSON types: what is measured, the recommended ladder, and how others do beside it.

    The ladder is that of `recommend` for the rows that the scheduler wants in each step of ``workload``. For each
    ladder there is what these steps take if every one is padded up to its bucket, and, as ``scheduled_seconds``,
    ``scheduled_padding`` and ``scheduled_steps``, what the scheduler makes of the workload when it has this ladder;
    that includes attention and CODA.
    """
    cost = measured.cost()
    wanted = subject.schedule(workload, cost, on_simulate=on_simulate).rows
    robust = recommend(subject, wanted, cost, workload, budget)
    histogram = Counter(wanted)
    ladders = []
    for each in compare(histogram, cost, robust.ladder):
        plain = {name: getattr(each, name) for name in each.__slots__ if name != "ladder"}
        plan = subject.schedule(workload, cost, each.ladder, on_simulate)
        plain |= {"scheduled_seconds": plan.seconds, "scheduled_padding": plan.padding}
        plain |= {"scheduled_steps": len(plan.rows), "padding_share": each.padding_share}
        ladders.append({**plain, "sizes": list(each.ladder.sizes)})
    return {
        **subject.fingerprint(),
        "commit": machine_facts()["commit"],
        "rates": measured.rates,
        **subject.weights(),
        "core": [asdict(each) for each in measured.core],
        "coda": [asdict(each) for each in measured.coda],
        "cost": cost.to_dict(),
        "workload": {
            "name": workload.name,
            "requests": len(workload.requests),
            "steps": len(wanted),
            "histogram": {str(rows): steps for rows, steps in sorted(histogram.items())},
        },
        "budget": asdict(budget),
        "ladder": list(robust.ladder.sizes),
        "robust": _scores(robust),
        "ladders": ladders,
    }


def _scores(robust: RobustLadder) -> dict[str, float]:
    names = ("smoothing", "fitted_seconds", "held_out_seconds", "unsmoothed_seconds", "loss")
    return {name: getattr(robust, name) for name in names}
