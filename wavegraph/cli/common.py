"""What commands share: the error-to-exit-code rule, option types, and JSON output that is checked early."""

import errno
import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

from wavegraph.errors import OutputError, WavegraphError

Command = TypeVar("Command", bound=Callable[..., Any])

STDOUT = Path("-")


class CommandGroup(click.Group):
    """A group whose commands end as they should.

    A `WavegraphError` becomes one sentence on stderr and its exit code (2 for the caller's mistakes, 1
    otherwise), Ctrl-C becomes 130, neither with a traceback. Commands are imported when they are asked for.
    """

    def __init__(self, *, commands: dict[str, Callable[[], click.Command]], **attributes: Any) -> None:
        super().__init__(**attributes)
        self._loaders = commands

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All names, in the order given."""
        return list(self._loaders)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import one command; None if there is no such name."""
        loader = self._loaders.get(cmd_name)
        return loader() if loader is not None else None

    def invoke(self, ctx: click.Context) -> Any:
        """Run the chosen command under the rule above."""
        try:
            return super().invoke(ctx)
        except WavegraphError as error:
            click.echo(f"Error: {error}", err=True)
            ctx.exit(error.exit_code)
        except KeyboardInterrupt:
            click.echo("Interrupted.", err=True)
            ctx.exit(130)


def chunk_size(text: str) -> int | str:
    """An option that is a number of rows, or ``auto``."""
    if text == "auto":
        return text
    try:
        return int(text)
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a number of rows or 'auto'.") from None


def examples(*lines: str) -> str:
    """The end of a command's help."""
    return "\n".join(("\b", "Examples:", *(f"  wavegraph {line}" for line in lines)))


def complete_model(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """What a shell offers for a MODEL argument: the built-in model, and folders."""
    builtin = [CompletionItem("builtin")] if "builtin".startswith(incomplete) else []
    return [*builtin, CompletionItem(incomplete, type="dir")]


def integers(text: str) -> list[int]:
    """An option's value such as ``1,2,3``; empty text is an empty list. Raises `click.BadParameter`."""
    try:
        return [int(part) for part in text.split(",")] if text.strip() else []
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a comma-separated list of integers.") from None


def numbers(text: str) -> tuple[float, ...]:
    """An option's value such as ``1,0.5``. Raises `click.BadParameter`."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a comma-separated list of numbers.") from None


def json_output(command: Command) -> Command:
    """Add ``--json FILE`` (``-`` for stdout) as the argument ``json_path: Path | None``.

    Whether it can be written is found out before the command starts its work.
    """
    return click.option(
        "--json",
        "json_path",
        metavar="FILE",
        callback=_check_writable,
        help="Write the result as JSON to FILE, or to stdout for '-'.",
    )(command)


def emit(text: str, *, newline: bool = True) -> None:
    """Print a result to stdout. Raises `OutputError`, but leaves a reader that went away to click's quiet end."""
    try:
        _require_stdout()
        click.echo(text, nl=newline)
    except OSError as error:
        if error.errno == errno.EPIPE:
            raise
        _drop_stdout()
        raise OutputError(f"stdout cannot be written ({error.strerror}); send the result elsewhere") from error
    except UnicodeEncodeError as error:
        raise OutputError(f"stdout cannot show the result in {error.encoding}; set PYTHONIOENCODING=utf-8") from error


def _require_stdout() -> None:
    if sys.stdout is None or sys.stdout.closed:
        raise OutputError("stdout is closed, and the result goes there; open it, or name a file with --json")


def _drop_stdout() -> None:
    """Let what is buffered go nowhere, or Python tries to write it once more as it ends, and fails with 120."""
    with suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def write_json(path: Path, text: str) -> None:
    """Write a line of JSON to ``path``, or to stdout for ``-``. Raises `OutputError`."""
    if path == STDOUT:
        emit(text)
        return
    try:
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise _unwritable(path, error) from error


def _check_writable(ctx: click.Context, param: click.Parameter, value: str | None) -> Path | None:
    if value is None:
        return None
    path = Path(value)
    if path == STDOUT:
        _require_stdout()
        return path
    existed = path.exists()
    try:
        with path.open("a", encoding="utf-8"):
            pass
        if not existed:
            path.resolve().unlink()  # of a link that led nowhere, not the link but what was made at its end
    except OSError as error:
        raise _unwritable(path, error) from error
    return path


def _unwritable(path: Path, error: OSError) -> OutputError:
    return OutputError(f"--json {path}: cannot be written ({error.strerror}); name another file, or - for stdout")


def to_json(value: object) -> str:
    """``value`` as JSON with text kept readable."""
    return json.dumps(value, ensure_ascii=False)
