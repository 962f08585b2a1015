"""``wavegraph precompile``: compile what a model needs, into a folder."""

from pathlib import Path
from typing import Any

import click

from wavegraph.cli.common import complete_model, emit, examples, integers, json_output, to_json, write_json
from wavegraph.cli.engine import Bars, import_engine, model_path
from wavegraph.config import DEFAULT_BATCHED_TOKENS, EngineConfig


@click.command(
    "precompile",
    epilog=examples("precompile builtin --out bundle", "precompile builtin --out bundle --ladder 1,16,256"),
)
@click.argument("model", shell_complete=complete_model)
@click.option("--out", required=True, type=Path, metavar="DIR", help="The bundle's folder.")
@click.option(
    "--target", default="cpu", show_default=True, metavar="NAME", help="What it is for: cpu, sm_80, sm_90 or sm_100."
)
@click.option(
    "--ladder",
    type=integers,
    metavar="ROWS,…",
    help=f"Row counts to record.  [default: powers of two and their midpoints up to {DEFAULT_BATCHED_TOKENS}]",
)
@click.option("--dtype", default="auto", show_default=True, metavar="NAME", help="auto, float32, bfloat16 or float16.")
@click.option("--page-size", default=EngineConfig.page_size, show_default=True, metavar="N", help="Positions per page.")
@click.option(
    "--profile",
    "profile_path",
    metavar="FILE",
    help="Result of 'profile-buckets': put its costs into the bundle, and its ladder unless --ladder is given.",
)
@click.option(
    "--deterministic", is_flag=True, help="Of a GPU's bundle: products whose bits do not depend on the batch."
)
@json_output
def precompile_command(
    model: str,
    out: Path,
    ladder: list[int] | None,
    profile_path: str | None,
    json_path: Path | None,
    **given: Any,
) -> None:
    """Compile what MODEL needs into a bundle, for 'generate --bundle DIR' to run without a compiler.

    For cpu it is for CPUs with the instruction set of this one, or with the one that WAVEGRAPH_CPU_ISA names, and for
    these versions of torch and Wavegraph. For a GPU, which need not be here, Triton must be installed. No weights are
    read.
    """
    import_engine()
    from wavegraph.capture.bundle import add_cost
    from wavegraph.startup.precompile import precompile, read_profile

    cost, profiled = read_profile(profile_path) if profile_path is not None else (None, None)
    on_build = Bars().note("Compiling operators (once)")
    bundle = precompile(model_path(model), out, ladder=ladder or profiled, on_build=on_build, **given)
    if cost is not None:
        bundle = add_cost(out, cost)
    facts: dict[str, Any] = {"bundle": str(bundle.folder), "fingerprint": bundle.fingerprint}
    if json_path is not None:
        write_json(json_path, to_json(facts))
    else:
        holds = f"{len(bundle.kernels)} kernels" if bundle.kernels else bundle.isa
        emit(f"{bundle.folder}: {bundle.target} ({holds}), {bundle.fingerprint['dtype']}")
