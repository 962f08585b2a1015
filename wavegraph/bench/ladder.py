"""Ladders on the steps of a workload: other engines' default rules against one optimised on costs measured first."""

import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from wavegraph.bench.shape import Shape
from wavegraph.buckets.ladder import Ladder
from wavegraph.buckets.optimise import padding, predicted_seconds
from wavegraph.buckets.robust import optimise_robust
from wavegraph.buckets.rules import RULES
from wavegraph.buckets.samples import Point, Samples
from wavegraph.capture.backends.registry import create_backend
from wavegraph.config import EngineConfig
from wavegraph.engine.engine import Engine, Progress
from wavegraph.model.config import OuroConfig
from wavegraph.model.weights import Model, model_from_tensors
from wavegraph.startup.backend_choice import Runner
from wavegraph.study.bucket_probe import BucketProbe
from wavegraph.study.measure import Times, machine_facts, milliseconds
from wavegraph.study.profile import Budget, Subject
from wavegraph.study.workload import Workload


def bench_ladder(
    shape: Shape,
    depths: int,
    workload: Workload,
    config: EngineConfig,
    budget: Budget,
    *,
    steps: int,
    repeats: int,
    backend: str,
    on_measure: Progress | None = None,
) -> dict[str, Any]:
    """Milliseconds of CORE for ``steps`` steps drawn from a workload's, on each ladder, interleaved step by step.

    The optimised ladder comes from costs that are measured first, at ``shape.context``, and from all steps of the
    workload. Each step replays its bucket on every ladder before the next one does; only padding and the number of
    buckets differ. ``predicted_ms`` is what the fitted costs say to the same.
    """
    model_config = shape.config(depths=depths, max_len=max(shape.context, workload.longest))
    subject = _subject(shape, model_config, config, backend)
    with tempfile.TemporaryDirectory() as folder:
        samples = Samples(Path(folder, "samples.jsonl"), subject.fingerprint())
        measured = subject.measure(samples, on_measure=on_measure)
    cost = measured.cost()
    wanted = subject.schedule(workload, cost).rows
    top = config.row_budget
    robust = optimise_robust(wanted, cost, max_rows=top, **asdict(budget))
    ladders = {"optimised": robust.ladder} | {name: rule(top) for name, rule in RULES.items()}
    drawn = Random(0).choices(wanted, k=steps)
    times, attended = _run(subject, ladders, drawn, shape.context, repeats)
    histogram = Counter(drawn)
    table = []
    for name, ladder in ladders.items():
        seconds = predicted_seconds(histogram, ladder, replace(cost, host_seconds=0.0))
        seconds += cost.seconds_per_position * attended
        wasted = padding(histogram, ladder)
        table.append(
            {
                "name": name,
                "sizes": list(ladder.sizes),
                "ms": times[name].to_dict(),
                "ratio": times[name].median / times["optimised"].median,
                "predicted_ms": seconds * 1e3,
                "error": seconds * 1e3 / times[name].median - 1,
                "padding": wasted / (wasted + sum(drawn)),
            }
        )
    return {
        **machine_facts(),
        "benchmark": "ladder",
        "backend": subject.runner.backend.name,
        "isa": getattr(subject.runner.ops, "isa", None),
        "shape": {name: getattr(shape, name) for name in shape.__slots__},
        "depths": depths,
        "workload": workload.name,
        "workload_steps": len(wanted),
        "steps": steps,
        "mean_rows": sum(drawn) / steps,
        "held_out_loss": robust.loss,
        "cost": cost.to_dict(),
        "ladders": table,
    }


def _subject(shape: Shape, model_config: OuroConfig, config: EngineConfig, backend: str) -> Subject:
    def load(runner: Runner, longest: int, on_load: Progress | None) -> Model:
        weights = shape.weights(model_config)
        return model_from_tensors(model_config, weights, ops=runner.ops, dtype=shape.torch_dtype, max_model_len=longest)

    return Subject.of(load, model_config, shape.torch_dtype, config, backend, [shape.context])


def _run(
    subject: Subject, ladders: dict[str, Ladder], drawn: Sequence[int], context: int, repeats: int
) -> tuple[dict[str, Times], int]:
    """Times of all drawn steps on each ladder, of ``repeats`` rounds after one that does not count.

    Also the positions that all steps together attend.
    """
    union = tuple(sorted({size for ladder in ladders.values() for size in ladder.sizes}))
    backend = create_backend(subject.runner.backend.name)
    engine = Engine(subject.load(None), replace(subject, candidates=union).sizes(), backend=backend)
    probe, core, order = BucketProbe(engine, [context]), engine.executor.core, Random(0)
    rounds: list[dict[str, float]] = []
    for _ in range(repeats + 1):
        totals, attended = dict.fromkeys(ladders, 0.0), 0
        for rows in drawn:
            attended += probe.prepare(Point("core", rows, context))
            for name in order.sample(list(ladders), len(ladders)):
                replay = partial(core.replay, ladders[name].bucket(rows), rows)
                totals[name] += milliseconds(replay)
        rounds.append(totals)
    engine.close()
    return {name: Times.of([totals[name] for totals in rounds[1:]]) for name in ladders}, attended
