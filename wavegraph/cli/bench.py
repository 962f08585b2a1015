"""``wavegraph bench``: measure this machine. A table, then one line of JSON."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.table import Table

from wavegraph.cli.common import Command, emit, integers, json_output, to_json, write_json
from wavegraph.cli.engine import Bars, import_engine, model_path
from wavegraph.config import EngineConfig
from wavegraph.workload import find_workload

if TYPE_CHECKING:
    from wavegraph.bench.shape import Shape

_SIZES = {"hidden": 1024, "layers": 8, "heads": 8, "head_dim": 128, "inner": 2816, "page_size": 16}


@click.group("bench")
def bench_command() -> None:
    """Measure this machine. Ratios are of runs interleaved in one process; the last line is JSON."""


def _shape_options(command: Command) -> Command:
    for name, default in reversed(_SIZES.items()):
        declaration = f"--{name.replace('_', '-')}"
        command = click.option(declaration, name, default=default, type=click.IntRange(1), show_default=True)(command)
    return click.option("--dtype", default="bfloat16", show_default=True, metavar="NAME")(command)


def _common_options(repeats: int) -> Callable[[Command], Command]:
    def add(command: Command) -> Command:
        option = click.option(
            "--repeats", default=repeats, type=click.IntRange(1), show_default=True, help="Runs of each."
        )
        return click.option("--backend", default="auto", show_default=True, metavar="NAME")(
            option(json_output(command))
        )

    return add


@bench_command.command("replay")
@click.option("--rows", type=integers, default="1,16,64,256", show_default=True, help="Buckets.")
@click.option("--context", default=256, type=click.IntRange(1), show_default=True, help="Where each chunk ends.")
@click.option("--chunk", default=16, type=click.IntRange(1), show_default=True, help="Rows of a request.")
@_shape_options
@_common_options(15)
def replay_command(rows: list[int], repeats: int, backend: str, json_path: Path | None, **sizes: Any) -> None:
    """Replay CORE at each bucket, against plain eager modules of the same shape."""
    import_engine()
    from wavegraph.bench.replay import bench_replay

    result = bench_replay(_shape(sizes), rows, repeats, backend)
    lines = [
        (
            str(row["rows"]),
            _times(row["eager_ms"]),
            _times(row["replay_ms"]),
            f"{row['ratio']:.2f}",
            f"{row['weights_gbs']:.1f} ({row['weights_gbs'] / result['read_gbs']:.0%})",
            f"{row['tflops']:.3f} ({row['tflops'] / result['matrix_tflops']:.0%})",
        )
        for row in result["rows"]
    ]
    rates = f"memory read {result['read_gbs']:.1f} GB/s, matrix product {result['matrix_tflops']:.3f} TFLOP/s"
    columns = ("rows", "eager ms", "replay ms", "ratio", "weights GB/s", "TFLOP/s")
    _show(f"{result['backend']} ({result['isa']}), {result['threads']} threads; {rates}", columns, lines)
    _end(result, json_path)


@bench_command.command("attention")
@click.option("--rows", default=16, type=click.IntRange(1), show_default=True, help="Rows of the chunk.")
@click.option("--contexts", type=integers, default="512,2048,8192", show_default=True, help="Where the chunk ends.")
@_shape_options
@_common_options(15)
def attention_command(
    rows: int, contexts: list[int], repeats: int, backend: str, json_path: Path | None, **sizes: Any
) -> None:
    """Attention of one layer over pages, against gathering them and torch's own."""
    import_engine()
    from wavegraph.bench.replay import bench_attention

    result = bench_attention(_shape(sizes), rows, contexts, repeats, backend)
    lines = [
        (
            f"{rows} x {row['context']}",
            _times(row["gather_sdpa_ms"]),
            _times(row["attention_ms"]),
            f"{row['ratio']:.2f}",
        )
        for row in result["contexts"]
    ]
    columns = ("rows x context", "gather + SDPA ms", "attention ms", "ratio")
    _show(f"{result['backend']} ({result['isa']}), {result['threads']} threads", columns, lines)
    _end(result, json_path)


@bench_command.command("prefill")
@click.option("--requests", type=integers, default="1,4", show_default=True, help="Requests that arrive together.")
@click.option("--prompt-len", default=512, type=click.IntRange(1), show_default=True, help="Tokens of each prompt.")
@click.option("--chunk", default=16, type=click.IntRange(1), show_default=True, help="prefill_chunk_size.")
@click.option("--depths", default=4, type=click.IntRange(1), show_default=True, help="Loops of the model.")
@_shape_options
@_common_options(5)
def prefill_command(
    requests: list[int],
    prompt_len: int,
    depths: int,
    repeats: int,
    backend: str,
    json_path: Path | None,
    **sizes: Any,
) -> None:
    """First tokens of whole prompts through the engine: ordinary against wavefront prefill."""
    import_engine()
    from wavegraph.bench.prefill import bench_prefill

    result = bench_prefill(_shape(sizes), requests, prompt_len, depths, repeats, backend)
    lines = [
        (
            str(row["requests"]),
            _times(row["ordinary_ms"]),
            _times(row["wavefront_ms"]),
            f"{row['ratio']:.2f}",
            f"{row['ordinary_rows']:.1f}",
            f"{row['wavefront_rows']:.1f}",
        )
        for row in result["requests"]
    ]
    columns = ("requests", "ordinary ms", "wavefront ms", "ratio", "rows a step", "wavefront rows")
    _show(f"{result['backend']} ({result['isa']}), {result['threads']} threads", columns, lines)
    _end(result, json_path)


@bench_command.command("start")
@click.argument("model", default="builtin")
@click.option("--dtype", default="auto", show_default=True, metavar="NAME")
@click.option("--repeats", default=3, type=click.IntRange(1), show_default=True, help="Processes of each kind.")
@json_output
def start_command(model: str, dtype: str, repeats: int, json_path: Path | None) -> None:
    """A fresh process's time to its first token: empty cache, operators in the cache, bundle."""
    import_engine()
    from wavegraph.bench.start import bench_start

    result = bench_start(model_path(model), dtype, repeats)
    lines = [
        (row["case"], _times(row["first_token_ms"], 0), str(row["compiler_runs"]), row["ops"])
        for row in result["starts"]
    ]
    _show(f"{model}, {result['threads']} threads", ("start", "first token ms", "compiler runs", "operators"), lines)
    _end(result, json_path)


@bench_command.command("ladder")
@click.option("--workload", "name", default="chat", show_default=True, metavar="FILE|NAME", help="Whose steps.")
@click.option("--max-graphs", default=12, type=click.IntRange(1), show_default=True, help="Buckets when optimised.")
@click.option("--max-batched-tokens", default=256, type=click.IntRange(1), show_default=True, help="The top bucket.")
@click.option("--context", default=256, type=click.IntRange(1), show_default=True, help="Positions that rows attend.")
@click.option("--depths", default=4, type=click.IntRange(1), show_default=True, help="Loops of the model.")
@click.option(
    "--steps", default=100, type=click.IntRange(1), show_default=True, help="Steps drawn from the workload's."
)
@_shape_options
@_common_options(5)
def ladder_command(
    name: str,
    max_graphs: int,
    max_batched_tokens: int,
    depths: int,
    steps: int,
    repeats: int,
    backend: str,
    json_path: Path | None,
    **sizes: Any,
) -> None:
    """Other engines' default ladders against one optimised for a workload, on the same steps."""
    import_engine()
    from wavegraph.bench.ladder import bench_ladder
    from wavegraph.profile import Budget

    config = EngineConfig(max_num_batched_tokens=max_batched_tokens, page_size=sizes["page_size"])
    with Bars().show("Measuring") as on_measure:
        result = bench_ladder(
            _shape(sizes),
            depths,
            find_workload(name),
            config,
            Budget(max_graphs),
            steps=steps,
            repeats=repeats,
            backend=backend,
            on_measure=on_measure,
        )
    lines = [
        (
            row["name"],
            str(len(row["sizes"])),
            _times(row["ms"], 1),
            f"{row['ratio']:.3f}",
            f"{row['predicted_ms']:.1f} ({row['error']:+.1%})",
            f"{row['padding']:.1%}",
        )
        for row in result["ladders"]
    ]
    title = (
        f"{steps} of {result['workload_steps']} steps of {result['workload']}, {result['mean_rows']:.1f} rows each; "
    )
    columns = ("ladder", "buckets", "ms", "ratio", "predicted ms", "padding")
    _show(f"{title}{result['backend']} ({result['isa']}), {result['threads']} threads", columns, lines)
    _end(result, json_path)


def _shape(sizes: dict[str, Any]) -> "Shape":
    from wavegraph.bench.shape import Shape

    return Shape(**sizes)


def _times(times: dict[str, float], digits: int = 2) -> str:
    return f"{times['median']:.{digits}f} ({times['low']:.{digits}f}-{times['high']:.{digits}f})"


def _show(title: str, columns: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    table = Table(*columns, title=title)
    for line in lines:
        table.add_row(*line)
    console = Console(width=110)
    with console.capture() as captured:
        console.print(table)
    emit(captured.get(), newline=False)


def _end(result: dict[str, Any], json_path: Path | None) -> None:
    """The result as the last line of output, and in a file if one was named."""
    text = to_json(result)
    emit(text)
    if json_path is not None and str(json_path) != "-":
        write_json(json_path, text)
