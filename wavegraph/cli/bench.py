"""``wavegraph bench``: measure this machine. A table, then one line of JSON."""

from pathlib import Path
from typing import Any

import click

from wavegraph.cli.bench_engine import decode_command, prefill_command
from wavegraph.cli.bench_serve import serve_command
from wavegraph.cli.bench_tables import common_options, end, make_shape, shape_options, show, times
from wavegraph.cli.common import complete_model, examples, integers, json_output
from wavegraph.cli.engine import Bars, import_engine, model_path
from wavegraph.config import EngineConfig
from wavegraph.study.workload import find_workload


@click.group("bench")
def bench_command() -> None:
    """Measure this machine. Ratios are of runs interleaved in one process; the last line is JSON."""


bench_command.add_command(prefill_command)
bench_command.add_command(decode_command)
bench_command.add_command(serve_command)


@bench_command.command("step", epilog=examples("bench step --spans 16,64 --waiting 0,10000"))
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
        (str(row["spans"]), str(row["waiting"]), *(times(row[f"{name}_us"], 0) for name in names))
        for row in result["steps"]
    ]
    columns = ("spans", "waiting", "wall us", "CPU us", *PARTS)
    show("microseconds of a step; CPU time of the engine's thread, except wall", columns, lines)
    end(result, json_path)


@bench_command.command("replay", epilog=examples("bench replay --rows 1,16,256 --dtype float32"))
@click.option("--rows", type=integers, default="1,16,64,256", show_default=True, help="Buckets.")
@click.option("--context", default=256, type=click.IntRange(1), show_default=True, help="Where each chunk ends.")
@click.option("--chunk", default=16, type=click.IntRange(1), show_default=True, help="Rows of a request.")
@shape_options
@common_options(15)
def replay_command(rows: list[int], repeats: int, backend: str, json_path: Path | None, **sizes: Any) -> None:
    """Replay CORE at each bucket, against plain eager modules of the same shape."""
    import_engine()
    from wavegraph.bench.replay import bench_replay

    result = bench_replay(make_shape(sizes), rows, repeats, backend)
    lines = [
        (
            str(row["rows"]),
            times(row["eager_ms"]),
            times(row["replay_ms"]),
            f"{row['ratio']:.2f}",
            f"{row['weights_gbs']:.1f} ({row['weights_gbs'] / result['read_gbs']:.0%})",
            f"{row['tflops']:.3f} ({row['tflops'] / result['matrix_tflops']:.0%})",
        )
        for row in result["rows"]
    ]
    rates = f"memory read {result['read_gbs']:.1f} GB/s, matrix product {result['matrix_tflops']:.3f} TFLOP/s"
    columns = ("rows", "eager ms", "replay ms", "ratio", "weights GB/s", "TFLOP/s")
    show(f"{result['backend']} ({result['isa']}), {result['threads']} threads; {rates}", columns, lines)
    end(result, json_path)


@bench_command.command("attention", epilog=examples("bench attention --rows 64 --contexts 1024,4096"))
@click.option("--rows", default=16, type=click.IntRange(1), show_default=True, help="Rows of the chunk.")
@click.option("--contexts", type=integers, default="512,2048,8192", show_default=True, help="Where the chunk ends.")
@shape_options
@common_options(15)
def attention_command(
    rows: int, contexts: list[int], repeats: int, backend: str, json_path: Path | None, **sizes: Any
) -> None:
    """Attention of one layer over pages, against gathering them and torch's own."""
    import_engine()
    from wavegraph.bench.replay import bench_attention

    result = bench_attention(make_shape(sizes), rows, contexts, repeats, backend)
    lines = [
        (
            f"{rows} x {row['context']}",
            times(row["gather_sdpa_ms"]),
            times(row["attention_ms"]),
            f"{row['ratio']:.2f}",
        )
        for row in result["contexts"]
    ]
    columns = ("rows x context", "gather + SDPA ms", "attention ms", "ratio")
    show(f"{result['backend']} ({result['isa']}), {result['threads']} threads", columns, lines)
    end(result, json_path)


@bench_command.command("start", epilog=examples("bench start", "bench start ./checkpoint --repeats 5"))
@click.argument("model", default="builtin", shell_complete=complete_model)
@click.option("--dtype", default="auto", show_default=True, metavar="NAME")
@click.option("--repeats", default=3, type=click.IntRange(1), show_default=True, help="Processes of each kind.")
@json_output
def start_command(model: str, dtype: str, repeats: int, json_path: Path | None) -> None:
    """A fresh process's time to its first token: empty cache, operators in the cache, bundle."""
    import_engine()
    from wavegraph.bench.start import bench_start

    result = bench_start(model_path(model), dtype, repeats)
    lines = [
        (row["case"], times(row["first_token_ms"], 0), str(row["compiler_runs"]), row["ops"])
        for row in result["starts"]
    ]
    show(f"{model}, {result['threads']} threads", ("start", "first token ms", "compiler runs", "operators"), lines)
    end(result, json_path)


@bench_command.command("report", epilog=examples("bench report step.json replay.json --html page.html"))
@click.argument("files", nargs=-1, required=True, type=Path)
@click.option("--html", "page", required=True, type=Path, metavar="FILE", help="Where the page goes.")
def report_command(files: tuple[Path, ...], page: Path) -> None:
    """One page of HTML from results in FILES, which --json wrote."""
    from wavegraph.bench.report import read_result, write_report

    write_report([read_result(file) for file in files], page)


@bench_command.command("ladder", epilog=examples("bench ladder --workload chat --max-graphs 8"))
@click.option("--workload", "name", default="chat", show_default=True, metavar="FILE|NAME", help="Whose steps.")
@click.option("--max-graphs", default=12, type=click.IntRange(1), show_default=True, help="Buckets when optimised.")
@click.option("--max-batched-tokens", default=256, type=click.IntRange(1), show_default=True, help="The top bucket.")
@click.option("--context", default=256, type=click.IntRange(1), show_default=True, help="Positions that rows attend.")
@click.option("--depths", default=4, type=click.IntRange(1), show_default=True, help="Loops of the model.")
@click.option(
    "--steps", default=100, type=click.IntRange(1), show_default=True, help="Steps drawn from the workload's."
)
@shape_options
@common_options(5)
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
    from wavegraph.study.profile import Budget

    config = EngineConfig(max_num_batched_tokens=max_batched_tokens, page_size=sizes["page_size"])
    with Bars().show("Measuring") as on_measure:
        result = bench_ladder(
            make_shape(sizes),
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
            times(row["ms"], 1),
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
    show(f"{title}{result['backend']} ({result['isa']}), {result['threads']} threads", columns, lines)
    end(result, json_path)
