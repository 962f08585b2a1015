"""``wavegraph simulate``: the real scheduler with no model."""

import json
from pathlib import Path

import click

from wavegraph.buckets.ladder import Ladder
from wavegraph.cli.common import emit, json_output, write_json
from wavegraph.cli.engine import Bars
from wavegraph.scheduler.scheduler import SchedulerConfig
from wavegraph.simulate import SimulationResult, simulate

MAX_TOTAL = 1 << 26
"""Most tokens of all requests together: what one process can hold and a simulation can get through."""

MAX_ROWS = 1 << 20


@click.command("simulate")
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
    "--chunk", default=16, type=click.IntRange(1, MAX_ROWS), show_default=True, help="prefill_chunk_size, rows."
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
@click.option("--max-steps", type=click.IntRange(1), help="Stop after this many steps.")
@click.option("--check", is_flag=True, help="Judge every plan with the independent legality checker.")
@json_output
def simulate_command(
    requests: int,
    prompt_len: int,
    max_tokens: int,
    chunk: int,
    max_batched_tokens: int,
    max_num_seqs: int | None,
    page_size: int,
    depths: int,
    ladder: str | None,
    wavefront: bool,
    max_steps: int | None,
    check: bool,
    json_path: Path | None,
) -> None:
    """Count the steps a workload takes, and what planning and packing them costs the host.

    Runs the real scheduler and packing with no model. The RFC's case:

        wavegraph simulate --requests 4 --prompt-len 8064 --chunk 16 --max-batched-tokens 1024
    """
    seqs = min(requests, max_num_seqs or 256)
    tokens = prompt_len + max_tokens
    if requests * tokens > MAX_TOTAL:
        raise click.BadParameter(
            f"{requests} requests of {tokens} tokens are {requests * tokens}, but at most {MAX_TOTAL} can be "
            "simulated; lower --prompt-len, --max-tokens or --requests",
            param_hint="--requests",
        )
    config = SchedulerConfig(
        depths=depths,
        page_size=page_size,
        num_pages=seqs * -(-tokens // page_size),
        max_model_len=tokens,
        max_num_seqs=seqs,
        max_num_batched_tokens=max_batched_tokens,
        prefill_chunk_size=chunk,
        wavefront=wavefront,
    )
    buckets = _ladder(ladder, max_batched_tokens)
    with Bars().show("Simulating") as progress:
        result = simulate(
            [prompt_len] * requests,
            config,
            max_tokens=max_tokens,
            ladder=buckets,
            check=check,
            max_steps=max_steps,
            progress=progress,
        )
    if json_path is None:
        _print(result)
    else:
        write_json(json_path, json.dumps(result.as_dict()))


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
        emit(f"{name:>18}  {value:,}")
