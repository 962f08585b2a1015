"""What the benchmarks' commands share: options of the model's shape, tables, and the line of JSON at the end."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.table import Table

from wavegraph.cli.common import Command, emit, json_output, to_json, write_json

if TYPE_CHECKING:
    from wavegraph.bench.shape import Shape

_SIZES = {"hidden": 1024, "layers": 8, "heads": 8, "head_dim": 128, "inner": 2816, "vocab": 4096, "page_size": 16}


def shape_options(command: Command) -> Command:
    """The sizes of a random model, for `make_shape`."""
    for name, default in reversed(_SIZES.items()):
        declaration = f"--{name.replace('_', '-')}"
        command = click.option(declaration, name, default=default, type=click.IntRange(1), show_default=True)(command)
    return click.option("--dtype", default="bfloat16", show_default=True, metavar="NAME")(command)


def common_options(repeats: int) -> Callable[[Command], Command]:
    """``--backend``, ``--json`` and ``--repeats`` with its default."""

    def add(command: Command) -> Command:
        option = click.option(
            "--repeats", default=repeats, type=click.IntRange(1), show_default=True, help="Runs of each."
        )
        return click.option("--backend", default="auto", show_default=True, metavar="NAME")(
            option(json_output(command))
        )

    return add


def make_shape(sizes: dict[str, Any]) -> "Shape":
    """The shape that the options give. Raises `ConfigError` for a bad one."""
    from wavegraph.bench.shape import Shape

    return Shape(**sizes)


def times(summary: dict[str, float], digits: int = 2) -> str:
    """A median with its spread."""
    return f"{summary['median']:.{digits}f} ({summary['low']:.{digits}f}-{summary['high']:.{digits}f})"


def show(title: str, columns: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    """Print a table."""
    table = Table(*columns, title=title)
    for line in lines:
        table.add_row(*line)
    console = Console(width=130)
    with console.capture() as captured:
        console.print(table)
    emit(captured.get(), newline=False)


def end(result: dict[str, Any], json_path: Path | None) -> None:
    """The result as the last line of output, and in a file if one was named."""
    text = to_json(result)
    emit(text)
    if json_path is not None and str(json_path) != "-":
        write_json(json_path, text)
