"""Engine options of the commands that run a model, and loading it with progress bars on stderr."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from wavegraph.cli.common import Command, chunk_size, integers
from wavegraph.config import DEFAULT_BATCHED_TOKENS, DEFAULT_MODEL_LEN, EngineConfig
from wavegraph.engine.interrupts import interrupts_held

if TYPE_CHECKING:
    from wavegraph.llm import LLM


def _number(text: str) -> dict[str, Any]:
    return {"type": int, "metavar": "N", "help": text}


def _rows(text: str) -> dict[str, Any]:
    return {"type": int, "metavar": "ROWS", "help": text}


def _choice(text: str) -> dict[str, Any]:
    return {"metavar": "NAME", "help": text}


CHUNK_HELP = "prefill_chunk_size: most rows of one request, depth and step, or auto."

_OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "wavefront": ("--wavefront/--no-wavefront", {"help": "Rows of several depths in a step."}),
    "chunk": ("--chunk", {"type": chunk_size, "metavar": "ROWS", "help": CHUNK_HELP}),
    "max_batched_tokens": ("--max-batched-tokens", _rows("Most rows of a step.")),
    "max_num_seqs": ("--max-num-seqs", _number("Most requests alive at once.")),
    "max_model_len": ("--max-model-len", _number("Most tokens, prompt and output, of a request.")),
    "page_size": ("--page-size", _number("Positions per KV page.")),
    "num_pages": ("--num-pages", _number("Size of the KV pool in pages.")),
    "kv_cache_bytes": ("--kv-cache-bytes", _number("Size of the KV pool in bytes.")),
    "kv_cache_fraction": (
        "--kv-cache-fraction",
        {"type": float, "metavar": "F", "help": "Size of the KV pool as a fraction of the memory."},
    ),
    "buckets": ("--buckets", {"type": integers, "metavar": "ROWS,…", "help": "Row counts to record."}),
    "kv_layout": ("--kv-layout", _choice("The only one there is.")),
    "packing": ("--packing", _choice("fill or fifo: cut spans so that steps fill their buckets, or pad.")),
    "target_itl_ms": (
        "--target-itl-ms",
        {"type": float, "metavar": "MS", "help": "Bound a step's predicted time while decodes are live."},
    ),
    "step_mix": ("--step-mix", _choice("fused or separate: prompt and decode rows in one step or not.")),
    "stage_policy": ("--stage-policy", _choice("decode_first, refill or fifo: who goes first.")),
    "admission": ("--admission", _choice("incremental or worst_case: pages a request is admitted with.")),
    "admission_order": ("--admission-order", _choice("fcfs or priority.")),
    "swap_bytes": ("--swap-bytes", _number("Host memory for preempted requests, in bytes.")),
    "prefix_cache": ("--prefix-cache/--no-prefix-cache", {"help": "Share pages of equal prefixes."}),
    "async_scheduling": ("--async/--no-async", {"help": "Plan while steps run."}),
    "run_ahead": ("--run-ahead", _number("Steps planned ahead of the oldest result.")),
    "trace": ("--trace", {"metavar": "FILE", "help": "Write a trace of every step for Perfetto."}),
    "threads": ("--threads", _number("CPU threads.")),
    "check": ("--check", {"is_flag": True, "help": "Judge every plan with the legality checker."}),
    "deterministic": ("--deterministic", {"is_flag": True, "help": "A row's bits do not depend on the batch."}),
    "backend": ("--backend", _choice("auto, cuda, compiled, recorded or eager.")),
    "dtype": ("--dtype", _choice("auto, float32, bfloat16 or float16.")),
    "cost": ("--cost", {"metavar": "FILE", "help": "Measured costs of steps, in JSON."}),
    "bundle": ("--bundle", {"metavar": "DIR", "help": "Compile nothing: use what 'precompile' put into DIR."}),
}

_CONFIG_NAMES = {"chunk": "prefill_chunk_size", "max_batched_tokens": "max_num_batched_tokens"}

_DEFAULTS: dict[str, object] = {field.name: field.default for field in fields(EngineConfig)}

_DEFAULT_TEXTS: dict[str, object] = {
    "max_num_batched_tokens": f"the largest of --buckets, or {DEFAULT_BATCHED_TOKENS}",
    "max_model_len": f"the model's, at most the pool; {DEFAULT_MODEL_LEN} unless compiled or cuda",
    "kv_cache_bytes": "what all requests need, at most 4 GiB and half the memory, or what a GPU has left",
    "kv_cache_fraction": None,  # one of three ways to say the same
    "buckets": "powers of two and their midpoints",
    "check": None,  # a flag
    "deterministic": None,  # a flag
    "backend": "auto",
    "dtype": "auto",
}


@dataclass(frozen=True)
class EngineOptions:
    """What the options say: a config, and the arguments of `LLM` beside it."""

    config: EngineConfig
    arguments: dict[str, Any]


def engine_options(*, without: tuple[str, ...] = (), **defaults: object) -> Callable[[Command], Command]:
    """Add the engine's options; the command gets them as keyword arguments, for `take_options`.

    The help shows the ``defaults`` (by option name), or else those of `EngineConfig`.
    """

    def add(command: Command) -> Command:
        for name, (declaration, attributes) in reversed(_OPTIONS.items()):
            if name not in without:
                field = _CONFIG_NAMES.get(name, name)
                default = defaults.get(name, _DEFAULT_TEXTS.get(field, _DEFAULTS.get(field)))
                shown = {**attributes, "help": attributes["help"] + _default_help(default)}
                command = click.option(declaration, name, default=None, **shown)(command)
        return command

    return add


def _default_help(default: object) -> str:
    if default is None:
        return ""
    return f"  [default: {('off', 'on')[default] if isinstance(default, bool) else default}]"


def take_options(given: dict[str, Any], **defaults: Any) -> EngineOptions:
    """The given options over ``defaults`` (by option name) over those of `EngineConfig`.

    Raises `ConfigError` for a bad value.
    """
    values = {**defaults, **{name: value for name, value in given.items() if value is not None}}
    arguments: dict[str, Any] = {
        name: values.pop(name) for name in ("backend", "dtype", "trace", "bundle", "cost") if name in values
    }
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
        return LLM(
            model_path(model),
            options.config,
            on_build=bars.note("Compiling operators (once)"),
            on_load=on_load,
            on_capture=on_capture,
            **options.arguments,
        )


class Bars:
    """Progress bars on stderr; nothing at all when that is not a terminal, but for a note."""

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

    def note(self, label: str) -> Callable[[int, int], None]:
        """A line for work that is rarely needed and takes long: printed when it begins."""

        def tell(done: int, total: int) -> None:
            if done == 0:
                click.echo(f"{label} …", err=True)

        return tell
