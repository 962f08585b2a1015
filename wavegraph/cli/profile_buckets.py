"""``wavegraph profile-buckets``: measure what buckets cost here, and recommend a ladder for a workload."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.table import Table

from wavegraph.cli.common import complete_model, emit, examples, integers, json_output, to_json, write_json
from wavegraph.cli.engine import Bars, import_engine, model_path
from wavegraph.config import DEFAULT_BATCHED_TOKENS, EngineConfig
from wavegraph.errors import OutputError
from wavegraph.study.workload import NAMED, find_workload

if TYPE_CHECKING:
    from wavegraph.buckets.profile import Profile
    from wavegraph.study.profile import Subject

SAMPLES, PROFILE, PAGE = "samples.jsonl", "profile.json", "report.html"


@click.command(
    "profile-buckets",
    epilog=examples(
        "profile-buckets builtin --out profile --workload chat --max-graphs 8",
        "profile-buckets ./checkpoint --workload requests.jsonl --bundle ./bundle",
    ),
)
@click.argument("model", shell_complete=complete_model)
@click.option(
    "--out",
    default="wavegraph-profile",
    show_default=True,
    type=Path,
    metavar="DIR",
    help=f"Folder of {SAMPLES}, {PROFILE} and {PAGE}.",
)
@click.option(
    "--workload",
    "workload_name",
    default="chat",
    show_default=True,
    metavar="FILE|NAME",
    help=f"Requests: JSON lines, a trace, or one of {', '.join(NAMED)}.",
)
@click.option("--max-graphs", default=12, show_default=True, type=click.IntRange(1), help="Most buckets of the ladder.")
@click.option("--max-bytes", type=click.IntRange(0), help="Most bytes that recordings of CORE may keep.")
@click.option("--max-capture-seconds", type=click.FloatRange(0), help="Most seconds to record CORE at all buckets.")
@click.option("--candidates", type=integers, metavar="ROWS,…", help="Buckets to measure.  [default: 8 an octave]")
@click.option("--contexts", type=integers, metavar="N,…", help="Contexts to measure at.  [default: 64,256,1024]")
@click.option(
    "--max-batched-tokens",
    default=DEFAULT_BATCHED_TOKENS,
    show_default=True,
    type=click.IntRange(1),
    help="The largest batch, and so the top bucket.",
)
@click.option("--max-num-seqs", default=EngineConfig.max_num_seqs, show_default=True, help="Most requests alive.")
@click.option("--chunk", type=int, metavar="ROWS", help="prefill_chunk_size of the workload.  [default: the engine's]")
@click.option("--page-size", default=EngineConfig.page_size, show_default=True, metavar="N", help="Positions per page.")
@click.option("--dtype", default="auto", show_default=True, metavar="NAME")
@click.option("--backend", default="auto", show_default=True, metavar="NAME")
@click.option("--threads", type=int, metavar="N", help="CPU threads.")
@click.option("--bundle", type=Path, metavar="DIR", help="Precompile MODEL with ladder and costs into this bundle.")
@click.option("--fresh", is_flag=True, help="Measure anew what is in DIR.")
@json_output
def profile_buckets_command(
    model: str,
    out: Path,
    workload_name: str,
    max_graphs: int,
    max_bytes: int | None,
    max_capture_seconds: float | None,
    bundle: Path | None,
    json_path: Path | None,
    **given: Any,
) -> None:
    """Measure every candidate bucket of MODEL on this machine, and choose the ladder for a workload.

    What is measured is written at once: after Ctrl-C the same command goes on where it was. Random keys and values, at
    several contexts; a fit predicts the sizes between the candidates. The rows that steps want come from the scheduler
    itself, on virtual time.
    """
    import_engine()
    from wavegraph.capture.bundle import add_cost
    from wavegraph.startup.precompile import precompile
    from wavegraph.study.profile import Budget, report

    workload = find_workload(workload_name)
    bars = Bars()
    subject = _subject(model, bars, given)
    measured = _measure(subject, bars, out, given["fresh"])
    with bars.show("Simulating") as on_simulate:
        budget = Budget(max_graphs, max_bytes, max_capture_seconds)
        result = report(subject, measured, workload, budget, on_simulate)
    text = to_json(result)
    _write(out / PROFILE, text + "\n")
    _write(out / PAGE, _page(result, model))
    if bundle is not None:
        precompile(
            model_path(model),
            bundle,
            ladder=result["ladder"],
            dtype=result["dtype"],
            page_size=given["page_size"],
            on_build=bars.note("Compiling operators (once)"),
        )
        add_cost(bundle, measured.cost())
    if json_path is not None:
        write_json(json_path, text)
    else:
        _show(result, out)


def _subject(model: str, bars: Bars, given: dict[str, Any]) -> "Subject":
    from wavegraph.study.profile import Subject

    options = {"max_num_batched_tokens": given["max_batched_tokens"], "max_num_seqs": given["max_num_seqs"]}
    options |= {"page_size": given["page_size"], "threads": given["threads"]}
    if given["chunk"] is not None:
        options["prefill_chunk_size"] = given["chunk"]
    names = ("dtype", "backend", "contexts", "candidates")
    on_build = bars.note("Compiling operators (once)")
    return Subject.find(
        model_path(model), EngineConfig(**options), **{name: given[name] for name in names}, on_build=on_build
    )


def _measure(subject: "Subject", bars: Bars, out: Path, fresh: bool) -> "Profile":
    from wavegraph.buckets.samples import Samples

    samples = Samples(out / SAMPLES, subject.fingerprint(), fresh=fresh)
    try:
        with (
            bars.show("Loading") as on_load,
            bars.show("Recording") as on_capture,
            bars.show("Measuring") as on_measure,
        ):
            return subject.measure(samples, on_load=on_load, on_capture=on_capture, on_measure=on_measure)
    except KeyboardInterrupt:
        click.echo(f"What was measured is in {samples.path}; the same command goes on from there.", err=True)
        raise


def _page(result: dict[str, Any], model: str) -> str:
    from wavegraph.buckets.report import report_html
    from wavegraph.static import UPLOT_NOTICE, read_static

    name = "the built-in model" if model == "builtin" else Path(model).name
    script, style = read_static("uPlot.iife.min.js"), read_static("uPlot.min.css")
    return report_html(result, name=name, script=script, style=style, notice=UPLOT_NOTICE)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OutputError(f"{path}: cannot be written ({error.strerror}); name another folder with --out") from error


def _show(result: dict[str, Any], out: Path) -> None:
    contexts = sorted({replay["context"] for bucket in result["core"] for replay in bucket["replays"]})
    buckets = Table(*("rows", "record ms", "KiB", "nodes", *(f"context {each}: ms" for each in contexts), "rows/s"))
    for bucket in result["core"]:
        replays = {replay["context"]: replay for replay in bucket["replays"]}
        first = bucket["replays"][0]
        buckets.add_row(
            str(bucket["rows"]),
            f"{bucket['capture_seconds'] * 1e3:.1f}",
            f"{bucket['capture_bytes'] / 1024:,.0f}",
            str(bucket["nodes"]),
            *(_milliseconds(replays[each]) if each in replays else "" for each in contexts),
            f"{bucket['rows'] / first['median']:,.0f}",
        )
    ladders = Table("ladder", "buckets", "padded up: s", "saving", "padding", "scheduled: s", "padding", "record s")
    for each in result["ladders"]:
        ladders.add_row(
            each["name"],
            str(len(each["sizes"])),
            f"{each['seconds']:.3f}",
            f"{each['saving']:.1%}",
            f"{each['padding_share']:.1%}",
            f"{each['scheduled_seconds']:.3f}",
            f"{each['scheduled_padding']:.1%}",
            f"{each['capture_seconds']:.2f}",
        )
    console = Console(width=120)
    with console.capture() as captured:
        console.print(buckets)
        console.print(ladders)
    emit(captured.get(), newline=False)
    load, cost, robust = result["workload"], result["cost"], result["robust"]
    emit(f"ladder     {','.join(map(str, result['ladder']))}")
    emit(f"workload   {load['name']}: {load['requests']} requests, {load['steps']} steps")
    emit(f"prediction median error {cost['error']:.1%} at buckets left out of the fit; {cost['source']}")
    emit(f"held out   {robust['loss']:.1%} slower on a half of the steps not seen than the best ladder for it")
    emit(f"written    {out / PROFILE}, {out / PAGE}")


def _milliseconds(replay: dict[str, float]) -> str:
    median, low, high = (replay[name] * 1e3 for name in ("median", "low", "high"))
    return f"{median:.2f} ({low:.2f}-{high:.2f})"
