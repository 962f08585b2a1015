"""Profiles a model's buckets on this machine: what `wavegraph.buckets.profile` drives, and what is made of it.

CORE and CODA are replayed by themselves, on inputs that stay: spans of `SPAN_ROWS` rows, each of a request of its own,
that end at a context. Keys and values are random, and lie in pages in random order.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from wavegraph.bench.measure import machine_facts, matrix_rate, read_rate
from wavegraph.buckets.cost import CostModel
from wavegraph.buckets.ladder import Ladder
from wavegraph.buckets.optimise import Histogram
from wavegraph.buckets.profile import Profile, candidate_rows, points_of, profile
from wavegraph.buckets.robust import RobustLadder, optimise_robust
from wavegraph.buckets.rules import compare
from wavegraph.buckets.samples import Captured, Point, Samples
from wavegraph.config import EngineConfig
from wavegraph.engine import Engine, Progress
from wavegraph.errors import ConfigError
from wavegraph.model.config import OuroConfig
from wavegraph.model.loading import checkpoint_dtype, load_model, resolve_checkpoint
from wavegraph.model.sampling import Action
from wavegraph.model.weights import Model
from wavegraph.runner import AUTO, Runner, check_backend, make_runner
from wavegraph.sampling import SamplingParams
from wavegraph.scheduler.plan import StepPlan
from wavegraph.simulate import simulate
from wavegraph.sizing import Sizes, derive
from wavegraph.workload import Workload

SPAN_ROWS = 16
CONTEXTS = (64, 256, 1024)
"""Contexts that are measured where none are named: those that the model reaches."""

HOST_REQUESTS, HOST_PROMPT, HOST_TOKENS = 8, 24, 8
MAX_STEPS = 100_000

Load = Callable[[Runner, int, Progress | None], Model]
"""Makes a model for a runner and a number of positions, and says how far it is."""


class EngineProbe:
    """Replays of an idle, synchronous engine (``run_ahead`` 1). Its pools and tables are written over: it is spent.

    Raises `ConfigError` if ``contexts``, the largest of which must hold a span, do not fit the engine's pool.
    """

    def __init__(self, engine: Engine, contexts: Sequence[int], span_rows: int = SPAN_ROWS) -> None:
        self._engine = engine
        self._executor = engine.executor
        self._span_rows = span_rows
        self._pages = -(-max(contexts) // engine.executor.limits.page_size)
        self._filled = False
        limits = self._executor.limits
        slots = -(-limits.max_rows // span_rows)
        pages = slots * self._pages
        if slots > min(limits.max_num_seqs, limits.max_spans) or pages > limits.num_pages:
            raise ConfigError(
                f"contexts: {slots} requests of {max(contexts)} positions need {slots} slots and {pages} pages, "
                f"but the engine has {limits.max_num_seqs} and {limits.num_pages}; lower contexts, or the largest batch"
            )
        if min(contexts) < min(span_rows, limits.max_rows):
            raise ConfigError(f"contexts: {min(contexts)} cannot end a span of {span_rows} rows; raise it")

    def captured(self) -> Iterator[Captured]:
        """Facts of each recording."""
        for program, ladder in (("core", self._executor.core), ("coda", self._executor.coda)):
            for rows, facts in ladder.facts.items():
                yield Captured(program, rows, facts.seconds, facts.bytes, facts.nodes)

    def host_seconds(self) -> list[float]:
        """Steps of `HOST_REQUESTS` requests together, prompt and output, each without its replays."""
        engine, length = self._engine, self._executor.limits.max_model_len
        prompt = max(1, min(HOST_PROMPT, length - HOST_TOKENS))
        params = SamplingParams(max_tokens=min(HOST_TOKENS, length - prompt), ignore_eos=True)
        for index in range(HOST_REQUESTS):
            engine.add_request(str(index), [(index + 1) % engine.model.config.vocab_size] * prompt, params)
        seconds = []
        while engine.has_unfinished:
            replayed, started = self._replay_seconds(), perf_counter()
            engine.step()
            seconds.append(perf_counter() - started - (self._replay_seconds() - replayed))
        return seconds

    def _replay_seconds(self) -> float:
        stats = self._executor.stats
        return sum(each.seconds for each in (stats.core, stats.coda, stats.coda_full, stats.copy_exits, stats.tables))

    def rates(self) -> dict[str, float]:
        """Memory read rate in GB/s, matrix rate in TFLOP/s."""
        return {"read_gbs": read_rate(), "matrix_tflops": matrix_rate(self._engine.model.dtype)}

    def prepare(self, point: Point) -> int:
        """Lay out the spans of a CORE bucket, or the rows of a CODA bucket."""
        io = self._executor.io
        if not self._filled:
            self._fill_pools()
            self._filled = True
        io.span_count.zero_()
        if point.program == "coda":
            io.coda_slot[: point.rows] = torch.arange(point.rows, dtype=torch.int32)
            io.coda_pos.zero_()
            io.coda_depth.fill_(self._engine.model.config.total_ut_steps - 1)
            io.coda_action.fill_(Action.SAMPLE)
            return 0
        spans = -(-point.rows // self._span_rows)
        counts = torch.full((spans,), self._span_rows, dtype=torch.int32)
        counts[-1] = point.rows - (spans - 1) * self._span_rows
        io.header[:2] = torch.tensor([spans, point.rows], dtype=torch.int32)
        io.span_slot[:spans] = torch.arange(spans, dtype=torch.int32)
        io.span_depth[:spans] = torch.arange(spans, dtype=torch.int32) % self._engine.model.config.total_ut_steps
        io.span_start[:spans] = point.context - counts
        io.span_count[:spans] = counts
        return sum(count * (point.context - count) + count * (count + 1) // 2 for count in counts.tolist())

    def replay(self, point: Point) -> None:
        """One replay."""
        program = self._executor.core if point.program == "core" else self._executor.coda
        program.replay(point.rows, point.rows)

    def _fill_pools(self) -> None:
        """The same random keys and values in every page, and pages for every slot; those of spans are theirs alone."""
        pools, io, limits = self._executor.pools, self._executor.io, self._executor.limits
        io.header.zero_()
        for entries in (io.span_slot, io.token_slot, io.page_slot, io.param_slot, io.coda_slot):
            entries.fill_(limits.scratch_slot)  # no updates that a step of `host_seconds` left are made again
        for pool in (pools.k, pools.v, pools.hidden):
            pool[0].normal_()
            pool[1:] = pool[:1]
        table = io.page_table[:-1]
        slots, blocks = (torch.arange(size) for size in table.shape)
        order = torch.randperm(limits.num_pages, generator=torch.Generator().manual_seed(0))
        table.copy_(order[(slots[:, None] * self._pages + blocks) % limits.num_pages])


@dataclass(frozen=True, slots=True)
class Budget:
    """What a ladder may take: buckets, bytes and seconds of recording; None is no limit."""

    max_graphs: int = 12
    max_bytes: int | None = None
    max_capture_seconds: float | None = None


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

        def connect() -> EngineProbe:
            engine = Engine(self.load(on_load), sizes, backend=self.runner.backend, progress=on_capture)
            return EngineProbe(engine, self.contexts)

        points = points_of(sizes.ladder.sizes, sizes.coda_ladder.sizes, self.contexts)
        facts = self.fingerprint()
        words = f"{facts['cpu']}, {facts['threads']} threads, {facts['backend']} ({facts['isa']}), {facts['dtype']}"
        return profile(connect, points, samples, source=words, progress=on_measure)

    def wanted(self, workload: Workload, cost: CostModel, on_simulate: Progress | None = None) -> list[int]:
        """Rows that CORE wants in each step of a workload, from the scheduler itself, on virtual time.

        Requests are cut to the model's length, and share no prefix; a workload of more than `MAX_STEPS` steps is cut
        there.
        """
        config = replace(self.config, prefix_cache=False)
        sizes = derive(config, self.shape, self.dtype, dense_attention=self.runner.ops.dense_attention)
        rows: list[int] = []

        def note(plan: StepPlan) -> None:
            if plan.rows:
                rows.append(plan.rows)

        simulate(
            workload.limited(sizes.scheduler.max_model_len),
            sizes.scheduler,
            cost=cost,
            run_ahead=self.config.run_ahead_steps,
            max_steps=MAX_STEPS,
            progress=on_simulate,
            on_plan=note,
        )
        return rows

    def weights(self) -> dict[str, int]:
        """Bytes of the layers' products that a replay of CORE reads, and floating-point operations of a row."""
        shape = self.shape
        attention = shape.hidden_size * (2 * shape.q_size + 2 * shape.kv_size)
        count = shape.num_hidden_layers * (attention + 3 * shape.hidden_size * shape.intermediate_size)
        return {"weight_bytes": count * self.dtype.itemsize, "row_flops": 2 * count}


def report(
    subject: Subject, measured: Profile, wanted: Sequence[int], workload: Workload, budget: Budget
) -> dict[str, Any]:
    """All that was found, JSON types: what is measured, the recommended ladder, and how others do beside it.

    The ladder is `optimise_robust`'s for the rows ``wanted`` by the steps of ``workload``.
    """
    cost = measured.cost()
    top = subject.config.row_budget
    robust = optimise_robust(wanted, cost, max_rows=top, **asdict(budget))
    histogram = Counter(wanted)
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
        "ladders": _ladders(histogram, cost, robust.ladder),
    }


def _scores(robust: RobustLadder) -> dict[str, float]:
    names = ("smoothing", "fitted_seconds", "held_out_seconds", "unsmoothed_seconds", "loss")
    return {name: getattr(robust, name) for name in names}


def _ladders(histogram: Histogram, cost: CostModel, ladder: Ladder) -> list[dict[str, Any]]:
    table = []
    for each in compare(histogram, cost, ladder):
        facts = {name: getattr(each, name) for name in each.__slots__ if name != "ladder"}
        table.append({**facts, "sizes": list(each.ladder.sizes), "padding_share": each.padding_share})
    return table
