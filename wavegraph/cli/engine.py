"""Engine options of the commands that run a model, and loading it with progress bars on stderr."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from wavegraph.cli.common import Command, integers
from wavegraph.config import EngineConfig
from wavegraph.interrupts import interrupts_held

if TYPE_CHECKING:
    from wavegraph.llm import LLM

_OPTIONS = (
    click.option("--wavefront/--no-wavefront", default=None, help="Rows of several depths in a step.  [default: on]"),
    click.option("--chunk", type=int, metavar="ROWS", help="prefill_chunk_size: rows of one request, depth and step."),
    click.option("--max-batched-tokens", type=int, metavar="ROWS", help="Most rows of a step."),
    click.option("--max-num-seqs", type=int, metavar="N", help="Most requests alive at once."),
    click.option("--max-model-len", type=int, metavar="N", help="Most tokens, prompt and output, of a request."),
    click.option("--page-size", type=int, metavar="N", help="Positions per KV page."),
    click.option("--num-pages", type=int, metavar="N", help="Size of the KV pool in pages."),
    click.option("--kv-cache-bytes", type=int, metavar="BYTES", help="Size of the KV pool in bytes."),
    click.option("--buckets", type=integers, metavar="ROWS,…", help="Row counts to record."),
    click.option("--kv-layout", metavar="NAME", help="Only last_exited exists."),
    click.option("--threads", type=int, metavar="N", help="CPU threads."),
    click.option("--check", is_flag=True, default=None, help="Judge every plan with the legality checker."),
    click.option("--backend", metavar="NAME", help="recorded or eager."),
    click.option("--dtype", metavar="NAME", help="auto, float32, bfloat16 or float16.  [default: auto]"),
)

_CONFIG_NAMES = {"chunk": "prefill_chunk_size", "max_batched_tokens": "max_num_batched_tokens"}


@dataclass(frozen=True)
class EngineOptions:
    """What the options say: a config, and the arguments of `LLM` beside it."""

    config: EngineConfig
    arguments: dict[str, str]


def engine_options(command: Command) -> Command:
    """Add the engine's options; the command gets them as keyword arguments, for `take_options`."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def take_options(given: dict[str, Any], **defaults: Any) -> EngineOptions:
    """The given options over ``defaults`` (by option name) over those of `EngineConfig`.

    Raises `ConfigError` for a bad value.
    """
    values = {**defaults, **{name: value for name, value in given.items() if value is not None}}
    arguments: dict[str, str] = {name: values.pop(name) for name in ("backend", "dtype") if name in values}
    if "buckets" in values:
        values["buckets"] = tuple(values["buckets"])
    return EngineOptions(EngineConfig(**{_CONFIG_NAMES.get(name, name): v for name, v in values.items()}), arguments)


def import_engine() -> None:
    """Import torch and all that needs it; commands that do call this first.

    Ctrl-C waits: NumPy and torch turn one that meets them half imported into an ImportError.
    """
    with interrupts_held():
        import wavegraph.llm  # noqa: F401


def model_path(model: str) -> str | Path:
    """The MODEL argument: ``builtin``, a folder, or a Hub id."""
    if model == "builtin":
        from wavegraph.builtin import builtin_path

        return builtin_path()
    return model


def load(model: str, options: EngineOptions, bars: "Bars") -> "LLM":
    """Load and record a model, showing how far it is."""
    import_engine()
    from wavegraph.llm import LLM

    with bars.show("Loading") as on_load, bars.show("Recording") as on_capture:
        return LLM(model_path(model), options.config, on_load=on_load, on_capture=on_capture, **options.arguments)


class Bars:
    """Progress bars on stderr; nothing at all when that is not a terminal."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)

    @contextmanager
    def show(self, label: str) -> Iterator[Callable[[int, int], None]]:
        """One bar for the time of the block; yields the function that moves it, ``(done, total)``."""
        columns = TextColumn(f"{label:>10}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn()
        with Progress(*columns, console=self._console, disable=not self._console.is_terminal, transient=True) as bar:
            task = bar.add_task(label, total=None)

            def move(done: int, total: int) -> None:
                bar.update(task, completed=done, total=total)

            yield move
