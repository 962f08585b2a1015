"""Benchmarks of whole engines: ``wavegraph bench prefill`` and ``wavegraph bench decode``."""

from pathlib import Path
from typing import Any

import click

from wavegraph.cli.bench_tables import common_options, end, make_shape, shape_options, show, times
from wavegraph.cli.common import Command, chunk_size, examples, numbers
from wavegraph.cli.engine import Bars, import_engine
from wavegraph.study.workload import find_workload


def _engine_options(command: Command) -> Command:
    """How whole engines are run."""
    for declaration, default, text in (
        ("--depths", 4, "Loops of the model."),
        ("--max-batched-tokens", 1024, "Most rows of a step."),
    ):
        option = click.option(declaration, default=default, type=click.IntRange(1), show_default=True, help=text)
        command = option(command)
    return click.option("--packing", default="fill", show_default=True, metavar="NAME", help="fill or fifo.")(command)


@click.command("prefill", epilog=examples("bench prefill --workload 4x512 --chunks 64,16"))
@click.option(
    "--workload",
    "workloads",
    default="1x512,4x512",
    show_default=True,
    metavar="NAME|FILE,…",
    help="Prompts that arrive at once; rfc, mixed-32 and mixed-128 are the RFC's.",
)
@click.option("--chunks", default="128,64,32,16,8,auto", show_default=True, metavar="ROWS|auto,…", help="Chunk sizes.")
@click.option(
    "--max-num-seqs", default=256, type=click.IntRange(1), show_default=True, help="Most requests running at once."
)
@click.option("--scale", default=1.0, show_default=True, help="Prompts so many times as long.")
@_engine_options
@shape_options
@common_options(5)
def prefill_command(
    workloads: str,
    chunks: str,
    scale: float,
    depths: int,
    max_batched_tokens: int,
    packing: str,
    max_num_seqs: int,
    repeats: int,
    backend: str,
    json_path: Path | None,
    **sizes: Any,
) -> None:
    """First tokens of whole prompts through the engine, by chunk size: ordinary against wavefront prefill."""
    import_engine()
    from wavegraph.bench.prefill import bench_prefill

    with Bars().show("Running") as progress:
        result = bench_prefill(
            make_shape(sizes),
            [find_workload(name).scaled(scale) for name in workloads.split(",")],
            [chunk_size(each) for each in chunks.split(",")],
            depths=depths,
            budget=max_batched_tokens,
            packing=packing,
            seqs=max_num_seqs,
            repeats=repeats,
            backend=backend,
            progress=progress,
        )
    for table in result["workloads"]:
        lines = [
            (
                str(row["chunk"]),
                "wavefront" if row["wavefront"] else "ordinary",
                times(row["ms"], 1),
                f"{row['prompt_tokens_per_s']:.1f} ({row['of_best']:.0%})",
                f"{row['over_ordinary']:.2f}",
                str(row["steps"]),
                f"{row['rows_per_step']:.2f}",
                f"{row['padding']:.1%}",
                f"{row['predicted_ms']:.1f} ({row['error']:+.0%})",
            )
            for row in table["variants"]
        ]
        title = f"{table['workload']}: {table['requests']} requests, {table['prompt_tokens']} prompt tokens; "
        title += f"{result['backend']} ({result['isa']}), {result['threads']} threads"
        columns = (
            "chunk",
            "prefill",
            "ms",
            "tokens/s (of best)",
            "ratio",
            "steps",
            "rows a step",
            "padding",
            "simulated",
        )
        show(title, columns, lines)
    end(result, json_path)


@click.command("decode", epilog=examples("bench decode --requests 16 --tokens 128"))
@click.option("--requests", default=8, type=click.IntRange(1), show_default=True, help="Requests that decode.")
@click.option("--tokens", default=64, type=click.IntRange(2), show_default=True, help="Tokens that each decodes.")
@click.option("--prompts", default=1, type=click.IntRange(1), show_default=True, help="Prompts that run beside them.")
@click.option("--prompt-len", default=512, type=click.IntRange(1), show_default=True, help="Tokens of each prompt.")
@click.option("--chunk", default="auto", type=chunk_size, show_default=True, help="prefill_chunk_size.")
@click.option("--thresholds", default="1,0.8,0.6,0.4", show_default=True, type=numbers, help="Of the gate.")
@_engine_options
@shape_options
@common_options(3)
def decode_command(
    requests: int,
    tokens: int,
    prompts: int,
    prompt_len: int,
    chunk: int | str,
    thresholds: tuple[float, ...],
    depths: int,
    max_batched_tokens: int,
    packing: str,
    repeats: int,
    backend: str,
    json_path: Path | None,
    **sizes: Any,
) -> None:
    """Gaps between tokens, with and without prompts beside; steps and tokens a second where tokens leave early."""
    import_engine()
    from wavegraph.bench.decode import Decode, bench_decode

    work = Decode(requests=requests, tokens=tokens, prompts=prompts, prompt_len=prompt_len, thresholds=thresholds)
    with Bars().show("Running") as progress:
        result = bench_decode(
            make_shape(sizes),
            work,
            chunk,
            depths=depths,
            budget=max_batched_tokens,
            packing=packing,
            repeats=repeats,
            backend=backend,
            progress=progress,
        )
    lines = [
        (
            row["beside"],
            ", ".join(f"{value:.1f}" for value in row["itl_ms"].values()),
            times(row["output_tokens_per_s"], 1),
            times(row["prompt_tokens_per_s"], 1),
        )
        for row in result["loads"]
    ]
    title = f"{requests} requests decode {tokens} tokens, beside {prompts} prompts of {prompt_len} at a time; "
    columns = ("prompts", "gap between tokens ms: p50, p90, p99", "output tokens/s", "prompt tokens/s")
    alone = result["alone"]
    title += f"alone {times(alone['ms'], 0)} ms, simulated {alone['predicted_ms']:.0f} ({alone['error']:+.0%}); "
    show(title + f"{result['backend']} ({result['isa']}), {result['threads']} threads", columns, lines)
    exits = [
        (
            f"{row['threshold']:g}",
            row["exit_kv"],
            f"{row['loops_per_token']:.2f}",
            f"{row['steps_per_token']:.2f}",
            times(row["output_tokens_per_s"], 1),
        )
        for row in result["exits"]
    ]
    show("early exit", ("threshold", "exit_kv", "loops a token", "steps a token", "output tokens/s"), exits)
    end(result, json_path)
