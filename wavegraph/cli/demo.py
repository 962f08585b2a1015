"""``wavegraph demo``: the same prompts with the wavefront off and on, the tokens compared, the work counted."""

import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from wavegraph.cli.common import complete_model, emit, examples, json_output, to_json, write_json
from wavegraph.cli.demo_exits import check_exits, describe, measure_exits, sentence
from wavegraph.cli.engine import Bars, engine_options, import_engine, load, model_path, take_options
from wavegraph.errors import EngineError, InputError
from wavegraph.outputs import RequestOutput, require_whole
from wavegraph.sampling import SamplingParams

if TYPE_CHECKING:
    from wavegraph.llm import LLM

PASSAGE = '''"""Rows of text, padded to columns.

This module implements a class and a few functions that take an iterable of strings and return them in columns of
equal width. The following functions are defined:

"""

import sys
from itertools import zip_longest


class Columns:
    """A list of rows that can be formatted.

    The optional argument *width* is the number of characters of a column. If it is not given, the width of the
    longest string is used. If *fill* is given, it must be a string of length 1.
    """

    def __init__(self, width=None, fill=" "):
        self.width = width
        self.fill = fill
        self.rows = []

    def append(self, row):
        """Add a row. Raise a ValueError if it is too long."""
        if self.width is not None and len(row) > self.width:
            raise ValueError("row is too long")
        self.rows.append(row)

    def'''
"""In the manner of what the built-in model was trained on: a module of a Python library."""

_SHOWN = 120
"""Characters of a prompt's end that are printed."""

FRACTIONS = (1.0, 0.55, 0.25, 0.08)
"""The prompts: beginnings of the text, of uneven length, so that the longest runs on alone."""

DEFAULTS: dict[str, Any] = {
    "chunk": 16,
    "max_batched_tokens": 256,
    "max_num_seqs": len(FRACTIONS),
    "prefix_cache": False,  # every run must do all of its work
    "stage_policy": "fifo",  # the RFC's order, so that the two differ in the wavefront alone
}
"""Engine options that differ from those of `EngineConfig`."""


@click.command("demo", epilog=examples("demo", "demo ./checkpoint --chunk 32 --repeats 5"))
@click.argument("model", default="builtin", shell_complete=complete_model)
@click.option("--prompt", "text", default=PASSAGE, metavar="TEXT", help="A text; its beginnings are the prompts.")
@click.option(
    "--max-tokens", type=click.IntRange(2), default=48, show_default=True, metavar="N", help="Tokens to generate each."
)
@click.option("--repeats", type=click.IntRange(1), default=3, show_default=True, help="Measured runs of each mode.")
@engine_options(without=("wavefront",), max_model_len="what the prompts need", **DEFAULTS)
@json_output
def demo_command(model: str, text: str, max_tokens: int, repeats: int, json_path: Path | None, **given: Any) -> None:
    """Generate from MODEL with the wavefront off and on; fails unless the tokens are equal.

    Prints the text, for each mode how full its steps were and how fast it was, and what early exit saves: medians of
    interleaved runs after a warm-up. MODEL is 'builtin' if left out; its text reads like Python's documentation and
    sources, on which it was trained.
    """
    import_engine()
    from wavegraph.model.loading import resolve_checkpoint

    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    prompts = [text[: max(1, int(len(text) * fraction))] for fraction in FRACTIONS]
    folder = resolve_checkpoint(model_path(model))
    defaults = {**DEFAULTS, "max_model_len": _count_tokens(folder, text) + max_tokens}
    bars = Bars()
    off, on = (
        _Mode(on, load(model, take_options({**given, "wavefront": on}, **defaults), bars)) for on in (False, True)
    )
    with off.llm, on.llm, bars.show("Generating") as move:
        for repeat in range(repeats + 1):
            for mode in (off, on):
                mode.run(prompts, params, warm_up=repeat == 0)
            move(repeat + 1, repeats + 1)
        equal = [one.token_ids for one in off.outputs] == [other.token_ids for other in on.outputs]
        if not equal:
            raise EngineError("wavefront off and on generated different tokens, so one of them is wrong")
        ways = measure_exits(on.llm, prompts, params, repeats)
        exits = describe(*ways, check_exits(on.llm, folder, ways[1].outputs))
    if json_path is not None:
        write_json(json_path, to_json({"tokens_equal": True, "modes": [off.row(), on.row()], "early_exit": exits}))
    else:
        _print(on.outputs, (off.row(), on.row()), sentence(exits))


def _count_tokens(folder: Path, text: str) -> int:
    from wavegraph.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(folder)
    if tokenizer is None:
        raise InputError(f"{folder}: has no tokenizer.json, and the demo starts from text; see `wavegraph generate`")
    return len(tokenizer.encode(text))


@dataclass
class _Mode:
    """One of the two ways, its last outputs, and what its measured runs showed."""

    wavefront: bool
    llm: "LLM"
    outputs: list[RequestOutput] = field(default_factory=list)
    runs: list[dict[str, float]] = field(default_factory=list)

    def run(self, prompts: list[str], params: SamplingParams, *, warm_up: bool) -> None:
        before = self.llm.engine.stats().scheduler
        self.outputs = self.llm.generate(prompts, params)
        require_whole(self.outputs)
        after = self.llm.engine.stats().scheduler
        if warm_up:
            return
        steps = after.core_steps - before.core_steps
        rows = after.rows - before.rows
        padding = after.padding_rows - before.padding_rows
        self.runs.append({"steps": steps, "rows_per_step": rows / steps, "padding": padding / (rows + padding)})
        self.runs[-1] |= _speeds(self.outputs)

    def row(self) -> dict[str, float | bool]:
        medians = {name: statistics.median(run[name] for run in self.runs) for name in self.runs[0]}
        return {"wavefront": self.wavefront, **medians}


def _speeds(outputs: list[RequestOutput]) -> dict[str, float]:
    """Tokens a second of the whole call, which began when its first request arrived."""
    start = min(output.metrics.arrival for output in outputs)
    firsts = [output.metrics.first_token - start for output in outputs if output.metrics.first_token is not None]
    end = max(output.metrics.finished - start for output in outputs if output.metrics.finished is not None)
    return {
        "prompt_tokens_per_s": sum(len(output.prompt_token_ids) for output in outputs) / max(firsts),
        "time_to_first_token_ms": statistics.mean(firsts) * 1e3,
        "tokens_per_s": sum(len(output.token_ids) for output in outputs) / end,
    }


def _print(outputs: list[RequestOutput], rows: tuple[dict[str, Any], ...], last: str) -> None:
    console = Console()
    with console.capture() as captured:
        _show(console, outputs, rows)
        console.print(last, markup=False, highlight=False, soft_wrap=True)
    emit(captured.get(), newline=False)


def _show(console: Console, outputs: list[RequestOutput], rows: tuple[dict[str, Any], ...]) -> None:
    for output in outputs:
        prompt = output.prompt or ""
        shown = prompt if len(prompt) <= _SHOWN else f"… {prompt[-_SHOWN:]}"
        console.print(f"After {len(output.prompt_token_ids)} tokens:", style="bold")
        console.print(Text(shown, style="dim").append(output.text or "", style="not dim"), soft_wrap=True)
        console.print()
    table = Table(title="tokens are equal")
    for name in ("wavefront", "steps", "rows/step", "padding", "prompt tok/s", "first token", "output tok/s"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            "on" if row["wavefront"] else "off",
            f"{row['steps']:.0f}",
            f"{row['rows_per_step']:.1f}",
            f"{row['padding']:.1%}",
            f"{row['prompt_tokens_per_s']:,.0f}",
            f"{row['time_to_first_token_ms']:.1f} ms",
            f"{row['tokens_per_s']:,.0f}",
        )
    console.print(table)
