"""``wavegraph bundle``: what a bundle holds."""

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
    from wavegraph.capture.bundle import machine_differences, read_bundle

    bundle = read_bundle(folder)
    facts: dict[str, Any] = {
        "fingerprint": bundle.fingerprint,
        "files": {name: path.stat().st_size for name, path in bundle.files.items()},
        "differences": machine_differences(bundle),
    }
    if json_path is not None:
        write_json(json_path, to_json(facts))
        return
    for name, value in bundle.fingerprint.items():
        emit(f"  {name:<28} {', '.join(map(str, value)) if isinstance(value, list) else value}")
    for name, size in facts["files"].items():
        emit(f"  {name}: {size:,} bytes")
    for difference in facts["differences"] or ["fits this machine"]:
        emit(difference)
