"""The command line: ``wavegraph``. Torch is imported only by the commands that need it, when they run."""

from collections.abc import Callable
from importlib import import_module

import click

from wavegraph.cli.common import CommandGroup


def _command(module: str) -> Callable[[], click.Command]:
    def load() -> click.Command:
        command: click.Command = getattr(import_module(f"wavegraph.cli.{module}"), f"{module}_command")
        return command

    return load


COMMANDS = (
    "generate",
    "chat",
    "serve",
    "precompile",
    "profile-buckets",
    "bundle",
    "bench",
    "simulate",
    "info",
    "demo",
    "completion",
)


@click.group(
    cls=CommandGroup,
    commands={name: _command(name.replace("-", "_")) for name in COMMANDS},
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.version_option(package_name="wavegraph")
def main() -> None:
    """Run looped language models as wavefront batches of recorded programs."""
