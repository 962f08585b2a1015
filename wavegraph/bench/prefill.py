"""Prompts through the whole engine: ordinary against wavefront prefill, by chunk size (the RFC's tables)."""

from collections.abc import Callable, Sequence
from typing import Any

from wavegraph.bench.shape import Shape
from wavegraph.bench.shared_engine import Run, SharedEngine
from wavegraph.errors import EngineError
from wavegraph.study.measure import Times
from wavegraph.study.workload import Workload

Progress = Callable[[int, int], None]
"""Called with the runs done, and in all."""

SPAN_ROWS = 16
"""Of the spans whose replays are measured: a chunk size in the middle of those compared."""


def bench_prefill(
    shape: Shape,
    workloads: Sequence[Workload],
    chunks: Sequence[int | str],
    *,
    depths: int,
    budget: int,
    packing: str,
    seqs: int,
    repeats: int,
    backend: str,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Seconds until all requests of each workload, which arrive at once, have their first token.

    Each chunk size runs ordinarily and as a wavefront, in turn, ``repeats`` rounds after one that does not count; at
    most ``seqs`` requests run at once, with at most ``budget`` rows a step. What replays cost is measured between
    rounds, and what a simulation says by it stands beside what was measured. Raises `EngineError` if first tokens
    differ on `compiled`, which promises that they do not.
    """
    workloads = [Workload.at_once(each.name, [r.prompt_tokens for r in each.requests]) for each in workloads]
    longest = max(workload.longest for workload in workloads)
    running = min(seqs, max(len(each.requests) for each in workloads))
    shared = SharedEngine(shape, depths, longest, budget, running, backend, span_rows=SPAN_ROWS)
    variants = [(chunk, wavefront) for chunk in chunks for wavefront in (False, True)]
    configs = [
        shared.variant(prefill_chunk_size=chunk, packing=packing, wavefront=wavefront) for chunk, wavefront in variants
    ]
    total = len(workloads) * len(variants) * (repeats + 1)
    done = 0
    tables = []
    for workload in workloads:
        rounds: list[list[Run]] = []
        for _ in range(repeats + 1):
            shared.measure_cost()
            rounds.append([])
            for config in configs:
                rounds[-1].append(shared.run(config, workload))
                done += 1
                if progress is not None:
                    progress(done, total)
        if shared.bit_invariant:
            _check_tokens(workload, rounds[0])
        table = _table(workload, variants, rounds[1:])
        for config, row in zip(configs, table["variants"], strict=True):
            row |= shared.predict(config, workload, row["ms"]["median"])
        tables.append(table)
    shared.close()
    return {**shared.facts(), "benchmark": "prefill", "packing": packing, "workloads": tables}


def _check_tokens(workload: Workload, runs: Sequence[Run]) -> None:
    """No schedule may change a token."""
    first, *others = ({name: output.token_ids for name, output in run.outputs.items()} for run in runs)
    if any(other != first for other in others):
        raise EngineError(f"{workload.name}: first tokens differ between schedules")


def _table(
    workload: Workload, variants: Sequence[tuple[int | str, bool]], rounds: Sequence[Sequence[Run]]
) -> dict[str, Any]:
    rows = []
    for (chunk, wavefront), runs in zip(variants, zip(*rounds, strict=True), strict=True):
        times = Times.of([run.seconds * 1e3 for run in runs])
        run = runs[0]
        rows.append(
            {
                "chunk": chunk,
                "wavefront": wavefront,
                "ms": times.to_dict(),
                "prompt_tokens_per_s": workload.prompt_tokens / times.median * 1e3,
                "steps": run.steps,
                "rows_per_step": run.rows / run.steps,
                "padding": run.padding_rows / (run.rows + run.padding_rows),
            }
        )
    best = max(row["prompt_tokens_per_s"] for row in rows)
    for ordinary, wave in zip(rows[::2], rows[1::2], strict=True):
        for row in (ordinary, wave):
            row["of_best"] = row["prompt_tokens_per_s"] / best
            row["over_ordinary"] = ordinary["ms"]["median"] / row["ms"]["median"]
    return {
        "workload": workload.name,
        "requests": len(workload.requests),
        "prompt_tokens": workload.prompt_tokens,
        "variants": rows,
    }
