"""``wavegraph bundle``: what a bundle holds."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from wavegraph.cli.common import emit, examples, json_output, to_json, write_json
from wavegraph.cli.engine import import_engine


@click.group("bundle")
def bundle_command() -> None:
    """Look at bundles that 'precompile' made."""


@bundle_command.command("inspect", epilog=examples("bundle inspect ./bundle", "bundle inspect ./bundle --json -"))
@click.argument("folder", type=Path, metavar="DIR")
@json_output
def inspect_command(folder: Path, json_path: Path | None) -> None:
    """Check the bundle in DIR, show what it was made for, and what of it does not fit this machine.

    Whether it fits a model is found out when it is used.
    """
    import_engine()
    from wavegraph.capture.bundle import read_bundle
    from wavegraph.capture.fingerprint import machine_differences

    bundle = read_bundle(folder)
    facts: dict[str, Any] = {
        "fingerprint": bundle.fingerprint,
        "files": {name: path.stat().st_size for name, path in bundle.files.items()},
        "kernels": list(bundle.kernels),
        "differences": machine_differences(bundle),
    }
    if json_path is not None:
        write_json(json_path, to_json(facts))
        return
    for name, value in bundle.fingerprint.items():
        emit(f"  {name:<28} {', '.join(map(str, value)) if isinstance(value, list) else value}")
    _show_kernels(bundle.kernels)
    for name, size in facts["files"].items():
        emit(f"  {name}: {size:,} bytes")
    for difference in facts["differences"] or ["fits this machine"]:
        emit(difference)


def _show_kernels(kernels: Sequence[dict[str, Any]]) -> None:
    """A line a kernel: per thread its registers and the bytes that it spills, per block its bytes of shared memory."""
    if not kernels:
        return
    emit(f"  {'kernel':<36} {'registers':>9} {'spills':>6} {'shared':>7}")
    for kernel in kernels:
        spills = kernel["stack"] + kernel["local"]
        emit(f"  {kernel['name']:<36} {kernel['registers']:>9} {spills:>6} {kernel['shared']:>7}")
