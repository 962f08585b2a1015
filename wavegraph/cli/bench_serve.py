"""``wavegraph bench serve``."""

from pathlib import Path
from typing import Any

import click

from wavegraph.cli.bench_tables import common_options, end, make_shape, shape_options, show, times
from wavegraph.cli.common import examples
from wavegraph.cli.engine import import_engine


@click.command("serve", epilog=examples("bench serve --streams 32 --tokens 64"))
@click.option("--streams", default=16, type=click.IntRange(1), show_default=True, help="Requests at once.")
@click.option("--prompt-len", default=64, type=click.IntRange(1), show_default=True, help="Tokens of each prompt.")
@click.option("--tokens", default=32, type=click.IntRange(1), show_default=True, help="Tokens made for each.")
@click.option("--depths", default=4, type=click.IntRange(1), show_default=True, help="Loops of the model.")
@shape_options
@common_options(5)
def serve_command(
    streams: int,
    prompt_len: int,
    tokens: int,
    depths: int,
    repeats: int,
    backend: str,
    json_path: Path | None,
    **sizes: Any,
) -> None:
    """Tokens per second of streams over HTTP, from a server process, against the same work offline."""
    import_engine()
    from wavegraph.bench.serve import bench_serve

    result = bench_serve(make_shape(sizes), streams, prompt_len, tokens, depths, repeats, backend)
    lines = [
        (
            run["side"],
            times(run["tokens_s"], 1),
            times(run["run_ms"], 0),
            f"{run['replay_seconds'] * 1e3:.0f}",
            f"{run['steps']:.0f}",
            f"{run['cpu_seconds'] * 1e3:.0f}",
            f"{run['client_cpu_seconds'] * 1e3:.0f}",
        )
        for run in result["sides"]
    ]
    columns = ("side", "tokens/s", "run ms", "of it in replays", "steps", "CPU ms", "clients' CPU ms")
    title = f"{streams} streams, {result['isa']}, {result['threads']} threads; HTTP is {result['ratio']:.0%} of offline"
    show(title, columns, lines)
    end(result, json_path)
