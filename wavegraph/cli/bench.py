"""``wavegraph bench``: measure this machine. A table, then one line of JSON."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.table import Table

from wavegraph.cli.common import Command, emit, integers, json_output, numbers, to_json, write_json
from wavegraph.cli.engine import Bars, import_engine, model_path
from wavegraph.config import EngineConfig
from wavegraph.workload import find_workload

if TYPE_CHECKING:
    from wavegraph.bench.shape import Shape

_SIZES = {"hidden": 1024, "layers": 8, "heads": 8, "head_dim": 128, "inner": 2816, "vocab": 4096, "page_size": 16}


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


@bench_command.command("step")
@click.option("--spans", type=integers, default="16,64", show_default=True, help="Spans of a step, one row each.")
@click.option("--waiting", type=integers, default="0,1000", show_default=True, help="Requests in the queue.")
@click.option("--steps", default=400, type=click.IntRange(1), show_default=True, help="Steps of each, twice.")
@click.option("--async/--no-async", "asynchronous", default=True, show_default=True, help="Plan a step ahead.")
@json_output
def step_command(spans: list[int], waiting: list[int], steps: int, asynchronous: bool, json_path: Path | None) -> None:
    """Host time of a step, by spans and by waiting requests: programs are recorded as no-ops."""
    import_engine()
    from wavegraph.bench.step import PARTS, bench_step

    result = bench_step(spans, waiting, steps, asynchronous)
    names = ("step_wall", "step_cpu", *PARTS)
    lines = [
        (str(row["spans"]), str(row["waiting"]), *(_times(row[f"{name}_us"], 0) for name in names))
        for row in result["steps"]
    ]
    columns = ("spans", "waiting", "wall us", "CPU us", *PARTS)
    _show("microseconds of a step; CPU time of the engine's thread, except wall", columns, lines)
    _end(result, json_path)


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


def _engine_options(command: Command) -> Command:
    """How whole engines are run."""
    for declaration, default, text in (
        ("--depths", 4, "Loops of the model."),
        ("--max-batched-tokens", 1024, "Most rows of a step."),
    ):
        command = click.option(declaration, default=default, type=click.IntRange(1), show_default=True, help=text)(
            command
        )
    return command


@bench_command.command("prefill")
@click.option(
    "--workload",
    "workloads",
    default="1x512,4x512",
    show_default=True,
    metavar="NAME|FILE,…",
    help="Prompts that arrive at once; rfc, mixed-32 and mixed-128 are the RFC's.",
)
@click.option("--chunks", default="128,64,32,16,8", show_default=True, metavar="ROWS|auto,…", help="Chunk sizes.")
@click.option(
    "--max-num-seqs", default=256, type=click.IntRange(1), show_default=True, help="Most requests running at once."
)
@click.option("--scale", default=1.0, show_default=True, help="Prompts so many times as long.")
@_engine_options
@_shape_options
@_common_options(5)
def prefill_command(
    workloads: str,
    chunks: str,
    scale: float,
    depths: int,
    max_batched_tokens: int,
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
            _shape(sizes),
            [find_workload(name).scaled(scale) for name in workloads.split(",")],
            [_chunk(each) for each in chunks.split(",")],
            depths=depths,
            budget=max_batched_tokens,
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
                _times(row["ms"], 1),
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
        _show(title, columns, lines)
    _end(result, json_path)


@bench_command.command("decode")
@click.option("--requests", default=8, type=click.IntRange(1), show_default=True, help="Requests that decode.")
@click.option("--tokens", default=64, type=click.IntRange(2), show_default=True, help="Tokens that each decodes.")
@click.option("--prompts", default=1, type=click.IntRange(1), show_default=True, help="Prompts that run beside them.")
@click.option("--prompt-len", default=512, type=click.IntRange(1), show_default=True, help="Tokens of each prompt.")
@click.option("--chunk", default="16", metavar="ROWS|auto", show_default=True, help="prefill_chunk_size.")
@click.option("--thresholds", default="1,0.8,0.6,0.4", show_default=True, type=numbers, help="Of the gate.")
@_engine_options
@_shape_options
@_common_options(3)
def decode_command(
    requests: int,
    tokens: int,
    prompts: int,
    prompt_len: int,
    chunk: str,
    thresholds: tuple[float, ...],
    depths: int,
    max_batched_tokens: int,
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
            _shape(sizes),
            work,
            _chunk(chunk),
            depths=depths,
            budget=max_batched_tokens,
            repeats=repeats,
            backend=backend,
            progress=progress,
        )
    lines = [
        (
            row["beside"],
            ", ".join(f"{value:.1f}" for value in row["itl_ms"].values()),
            _times(row["output_tokens_per_s"], 1),
            _times(row["prompt_tokens_per_s"], 1),
        )
        for row in result["loads"]
    ]
    title = f"{requests} requests decode {tokens} tokens, beside {prompts} prompts of {prompt_len} at a time; "
    columns = ("prompts", "gap between tokens ms: p50, p90, p99", "output tokens/s", "prompt tokens/s")
    alone = result["alone"]
    title += f"alone {_times(alone['ms'], 0)} ms, simulated {alone['predicted_ms']:.0f} ({alone['error']:+.0%}); "
    _show(title + f"{result['backend']} ({result['isa']}), {result['threads']} threads", columns, lines)
    exits = [
        (
            f"{row['threshold']:g}",
            row["exit_kv"],
            f"{row['loops_per_token']:.2f}",
            f"{row['steps_per_token']:.2f}",
            _times(row["output_tokens_per_s"], 1),
        )
        for row in result["exits"]
    ]
    _show("early exit", ("threshold", "exit_kv", "loops a token", "steps a token", "output tokens/s"), exits)
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


@bench_command.command("report")
@click.argument("files", nargs=-1, required=True, type=Path)
@click.option("--html", "page", required=True, type=Path, metavar="FILE", help="Where the page goes.")
def report_command(files: tuple[Path, ...], page: Path) -> None:
    """One page of HTML from results in FILES, which --json wrote."""
    from wavegraph.bench.report import read_result, write_report

    write_report([read_result(file) for file in files], page)


def _chunk(text: str) -> int | str:
    """A chunk size, which `EngineConfig` judges."""
    return int(text) if text.isdecimal() else text


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
    console = Console(width=130)
    with console.capture() as captured:
        console.print(table)
    emit(captured.get(), newline=False)


def _end(result: dict[str, Any], json_path: Path | None) -> None:
    """The result as the last line of output, and in a file if one was named."""
    text = to_json(result)
    emit(text)
    if json_path is not None and str(json_path) != "-":
        write_json(json_path, text)
