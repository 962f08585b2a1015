"""``wavegraph simulate``: the real scheduler with no model."""

import json
from pathlib import Path
from typing import Any, Literal

import click
from click.core import ParameterSource

from wavegraph.buckets.cost import CostModel
from wavegraph.buckets.ladder import Ladder
from wavegraph.cli.common import chunk_size, emit, examples, json_output, write_json
from wavegraph.cli.engine import Bars
from wavegraph.scheduler.config import SchedulerConfig
from wavegraph.study.simulate import SimulationResult, simulate
from wavegraph.study.workload import Workload, find_workload

MAX_TOTAL = 1 << 26
"""Most tokens of all requests together: what one process can hold and a simulation can get through."""

MAX_ROWS = 1 << 20

MAX_HITS = 16
"""Buckets that are printed; without a ladder there can be as many as steps."""

UNITS = {"s": "seconds, by the cost model", "cost": "rows, and 16 a step: no cost was measured, only compare"}


@click.command(
    "simulate",
    epilog=examples(
        "simulate --requests 4 --prompt-len 8064 --chunk 16 --no-wavefront",
        "simulate --workload chat@2 --cost cost.json --ladder 1,8,32,64 --max-batched-tokens 64",
    ),
)
@click.option(
    "--workload", metavar="FILE|NAME", help="Requests from JSON lines, a trace, or by name; instead of the next three."
)
@click.option(
    "--requests",
    default=4,
    type=click.IntRange(1, 1 << 16),
    show_default=True,
    help="Requests, all present at the start.",
)
@click.option(
    "--prompt-len", default=8064, type=click.IntRange(1, MAX_TOTAL), show_default=True, help="Prompt tokens of each."
)
@click.option(
    "--max-tokens", default=1, type=click.IntRange(1, MAX_TOTAL), show_default=True, help="Output tokens of each."
)
@click.option(
    "--chunk",
    default="16",
    type=chunk_size,
    metavar="ROWS",
    show_default=True,
    help="prefill_chunk_size, or auto.",
)
@click.option(
    "--packing",
    default="fill",
    type=click.Choice(["fill", "fifo"]),
    show_default=True,
    help="Fill the buckets of --ladder, or pad.",
)
@click.option(
    "--max-batched-tokens",
    default=1024,
    type=click.IntRange(1, MAX_ROWS),
    show_default=True,
    help="Most rows of a step.",
)
@click.option(
    "--max-num-seqs", type=click.IntRange(1, 1 << 16), help="Most requests running at once.  [default: all, up to 256]"
)
@click.option(
    "--page-size", default=16, type=click.IntRange(1, MAX_ROWS), show_default=True, help="Positions per KV page."
)
@click.option("--depths", default=4, type=click.IntRange(1, 64), show_default=True, help="Loops of the model (D).")
@click.option("--ladder", help="Bucket sizes such as 16,64,256,1024, or 'default'.  [default: exact row counts]")
@click.option("--wavefront/--no-wavefront", default=True, show_default=True, help="Rows of several depths in a step.")
@click.option("--cost", "cost_path", metavar="FILE", help="Measured cost model, JSON.  [default: assumed proportions]")
@click.option(
    "--run-ahead", default=2, type=click.IntRange(1, 64), show_default=True, help="Steps in flight, as in the engine."
)
@click.option("--max-steps", type=click.IntRange(1), help="Stop after this many steps.")
@click.option("--check", is_flag=True, help="Judge every plan with the independent legality checker.")
@json_output
@click.pass_context
def simulate_command(
    context: click.Context,
    workload: str | None,
    requests: int,
    prompt_len: int,
    max_tokens: int,
    chunk: int | str,
    packing: Literal["fill", "fifo"],
    max_batched_tokens: int,
    max_num_seqs: int | None,
    page_size: int,
    depths: int,
    ladder: str | None,
    wavefront: bool,
    cost_path: str | None,
    run_ahead: int,
    max_steps: int | None,
    check: bool,
    json_path: Path | None,
) -> None:
    """Run a workload through the real scheduler with no model, on virtual time.

    Counts steps and padding, measures what planning and packing cost the host, and predicts throughput and latency from
    a cost model. The RFC's case:

        wavegraph simulate --requests 4 --prompt-len 8064 --chunk 16 --max-batched-tokens 1024
    """
    if isinstance(chunk, int) and not 1 <= chunk <= MAX_ROWS:
        raise click.BadParameter(f"{chunk} is not in 1..{MAX_ROWS}, nor 'auto'", param_hint="--chunk")
    load = _workload(context, workload) if workload else _uniform(requests, prompt_len, max_tokens)
    cost = CostModel.from_file(cost_path) if cost_path is not None else None
    if cost is None and load.requests[-1].arrival > 0:
        raise click.BadParameter(
            f"the requests of {load.name} arrive over time, so their steps need seconds; give --cost FILE, or a "
            "workload that arrives at once",
            param_hint="--workload",
        )
    seqs = min(len(load.requests), max_num_seqs or 256)
    config = SchedulerConfig(
        depths=depths,
        page_size=page_size,
        num_pages=seqs * -(-load.longest // page_size),
        max_model_len=load.longest,
        max_num_seqs=seqs,
        max_num_batched_tokens=max_batched_tokens,
        prefill_chunk_size=chunk if isinstance(chunk, int) else None,
        packing=packing,
        wavefront=wavefront,
    )
    buckets = _ladder(ladder, max_batched_tokens)
    with Bars().show("Simulating") as progress:
        result = simulate(
            load,
            config,
            ladder=buckets,
            coda_ladder=Ladder.default(seqs) if buckets else None,
            cost=cost,
            run_ahead=run_ahead,
            check=check,
            max_steps=max_steps,
            progress=progress,
        )
    if json_path is None:
        _print(result)
    else:
        write_json(json_path, json.dumps(result.as_dict()))


def _uniform(requests: int, prompt_len: int, max_tokens: int) -> Workload:
    tokens = prompt_len + max_tokens
    if requests * tokens > MAX_TOTAL:
        raise click.BadParameter(
            f"{requests} requests of {tokens} tokens are {requests * tokens}, but at most {MAX_TOTAL} can be "
            "simulated; lower --prompt-len, --max-tokens or --requests",
            param_hint="--requests",
        )
    return Workload.at_once("uniform", [prompt_len] * requests, max_tokens)


def _workload(context: click.Context, text: str) -> Workload:
    for name in ("requests", "prompt_len", "max_tokens"):
        if context.get_parameter_source(name) is not ParameterSource.DEFAULT:
            raise click.UsageError(
                f"--workload and --{name.replace('_', '-')} both say what the requests are: give one"
            )
    load = find_workload(text)
    if len(load.requests) * load.longest > MAX_TOTAL:
        raise click.BadParameter(
            f"{len(load.requests)} requests of up to {load.longest} tokens are more than the {MAX_TOTAL} tokens that "
            "can be simulated; take a part of the file",
            param_hint="--workload",
        )
    return load


def _ladder(text: str | None, max_rows: int) -> Ladder | None:
    """Parse ``--ladder``; the largest batch always gets a bucket."""
    if text is None:
        return None
    if text == "default":
        return Ladder.default(max_rows)
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        raise click.BadParameter(
            f"{text!r} is not 'default' or a comma-separated list of row counts", param_hint="--ladder"
        ) from None
    if max(sizes) > max_rows:
        raise click.BadParameter(
            f"bucket {max(sizes)} is larger than --max-batched-tokens {max_rows}", param_hint="--ladder"
        )
    return Ladder([*sizes, max_rows])


def _print(result: SimulationResult) -> None:
    for name, value in result.as_dict().items():
        emit(f"{name:>18}  {_text(name, value, result.unit)}")


def _text(name: str, value: Any, unit: str) -> str:
    if name == "bucket_hits":
        shown = [f"{bucket}: {hits}" for bucket, hits in value.items()]
        return ", ".join([*shown[:MAX_HITS], "…"] if len(shown) > MAX_HITS else shown)
    if name == "unit":
        return UNITS[unit]
    if name == "duration":
        return f"{value:,.4g} {unit}"
    if name.endswith("throughput"):
        return f"{value:,.4g} tokens / {unit}"
    if value is None:
        return "none"
    if isinstance(value, dict):
        return ", ".join(f"{key} {each:,.4g}" for key, each in value.items()) + f" {unit}"
    return f"{value:,}"
