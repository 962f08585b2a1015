"""Results of benchmarks as one page of HTML that needs nothing else: no file beside it, no script and no network.

A result is an object: facts of the machine, settings, and lists of objects, which become tables. Cells are numbers,
times (``median``, ``low``, ``high``) or percentiles (``p50``, ``p90``, ``p99``); the latter two are drawn as bars too.
"""

import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from wavegraph.errors import ConfigError, OutputError

TITLES = {
    "step": "Host time of a step",
    "replay": "Replay of CORE against plain eager modules",
    "attention": "Attention over pages against gather and SDPA",
    "prefill": "Prompts by chunk size, ordinary and wavefront",
    "decode": "Gaps between tokens, and early exits",
    "start": "A fresh process to its first token",
    "ladder": "Ladders: default rules against the optimised one",
    "serve": "Tokens over HTTP against offline generation",
}
"""Heading of each benchmark."""

FACTS = ("cpu", "machine", "threads", "backend", "isa", "torch", "python", "wavegraph", "commit")
"""Keys that say where a result is from."""

SHARES = ("of_best", "padding", "error")
"""Columns that are shown in per cent."""

WORDS = {"gbs": "GB/s", "tflops": "TFLOP/s", "itl": "ITL", "kv": "KV"}
"""Parts of keys that are no words."""

STYLE = """
:root { --back: #fff; --text: #1c2330; --soft: #667085; --line: #d9dee7; --bar: #3b82c4; --range: #1c2330; }
@media (prefers-color-scheme: dark) {
  :root { --back: #14181f; --text: #e6eaf0; --soft: #98a2b3; --line: #323a47; --bar: #4c8fce; --range: #e6eaf0; }
}
body { background: var(--back); color: var(--text); font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto;
  max-width: 76rem; padding: 0 1.5rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.25rem; margin: 2.5rem 0 .3rem; }
h3 { font-size: 1rem; margin: 1.4rem 0 .3rem; }
p { color: var(--soft); margin: .2rem 0; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; margin-top: .5rem; font-variant-numeric: tabular-nums; }
th { color: var(--soft); font-weight: 600; text-align: left; vertical-align: bottom; }
th, td { border-bottom: 1px solid var(--line); padding: .3rem .9rem .3rem 0; }
td.number { text-align: right; }
small { color: var(--soft); }
.bar { background: color-mix(in srgb, var(--line) 40%, transparent); height: .55rem; margin-top: .15rem;
  position: relative; width: 11rem; }
.bar i { background: var(--bar); display: block; height: 100%; }
.bar b { background: var(--range); height: 1px; position: absolute; top: 50%; }
"""


def read_result(path: str | Path) -> dict[str, Any]:
    """The result in a file of ``--json``, or in the last line of what a benchmark printed.

    Raises `ConfigError` if there is none.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").strip().splitlines()
        result = json.loads(lines[-1]) if lines else None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: holds no result of a benchmark ({error}); give a file written by --json") from error
    if not isinstance(result, dict) or "benchmark" not in result:
        raise ConfigError(f"{path}: holds no result of a benchmark; give a file written by --json")
    return result


def write_report(results: Sequence[Mapping[str, Any]], path: str | Path) -> None:
    """Write the page of the results, in their order. Raises `OutputError`."""
    try:
        Path(path).write_text(report_html(results), encoding="utf-8")
    except OSError as error:
        raise OutputError(f"--html {path}: cannot be written ({error.strerror}); name another file") from error


def report_html(results: Sequence[Mapping[str, Any]]) -> str:
    """The page."""
    parts = [
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<link rel="icon" href="data:,">\n<title>Wavegraph benchmarks</title>',
        f"<style>{STYLE}</style>\n</head>\n<body>",
        "<h1>Wavegraph benchmarks</h1>",
        "<p>Bars are medians, and the line on each spans the 10th to the 90th percentile (of gaps between tokens, the "
        "50th to the 99th). Bars of one unit in one table have one scale. Of times less is better, of rates more. "
        "What is compared ran in turn in one process; figures of different machines, or of different days, make no "
        "ratios.</p>",
        *(_section(result) for result in results),
        "</body>\n</html>\n",
    ]
    return "\n".join(parts)


def _section(result: Mapping[str, Any]) -> str:
    name = result["benchmark"]
    facts = [f"{key} {short(result[key])}" for key in FACTS if result.get(key) is not None]
    settings = [f"{words(key)} {short(value)}" for key, value in _settings(result)]
    parts = [f"<h2>{escape(TITLES.get(name, name))}</h2>", f"<p>{escape(', '.join(facts))}</p>"]
    if settings:
        parts.append(f"<p>{escape(', '.join(settings))}</p>")
    for key, value in result.items():
        if _is_table(value):
            parts.append(_tables(words(key), value))
    return "\n".join(parts)


def _settings(result: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Scalars that say how a result was made; those of ``shape`` too. A cost model is left to the file."""
    flat = {**result, **result.get("shape", {})}
    return [
        (key, value)
        for key, value in flat.items()
        if key not in (*FACTS, "benchmark") and isinstance(value, int | float | str)
    ]


def _is_table(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(row, dict) for row in value)


def _tables(title: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """One table, or, of rows that hold tables, one for each of them."""
    nested = [key for key, value in rows[0].items() if _is_table(value)]
    if not nested:
        return f"<h3>{escape(title)}</h3>\n{_table(rows)}"
    parts = []
    for row in rows:
        heading = ", ".join(f"{words(key)} {short(value)}" for key, value in row.items() if not _is_table(value))
        parts += [f"<h3>{escape(heading)}</h3>\n{_table(row[key])}" for key in nested]
    return "\n".join(parts)


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    columns = list(rows[0])
    tops: dict[str, float] = {}
    for column in columns:
        unit = column.rsplit("_", 1)[-1]
        tops[unit] = max(tops.get(unit, 0.0), *(_top(row[column]) for row in rows))
    head = "".join(f"<th>{escape(words(column))}</th>" for column in columns)
    body = "\n".join(
        "<tr>" + "".join(_cell(column, row[column], tops[column.rsplit("_", 1)[-1]]) for column in columns) + "</tr>"
        for row in rows
    )
    return f'<div class="wide"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table></div>'


def _top(value: Any) -> float:
    """The end of a cell's bar, 0 without one."""
    return float(max(value.values())) if isinstance(value, dict) else 0.0


def _cell(column: str, value: Any, top: float) -> str:
    if isinstance(value, dict):
        if "median" in value:
            middle, low, high = value["median"], value["low"], value["high"]
            others = f"{short(low)} to {short(high)}"
        else:
            middle, low, high = value["p50"], value["p50"], value["p99"]
            others = f"p90 {short(value['p90'])}, p99 {short(high)}"
        return f"<td>{short(middle)} <small>{others}</small>{_bar(middle, low, high, top)}</td>"
    if column in SHARES and isinstance(value, int | float):
        return f'<td class="number">{value:.1%}</td>'
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f'<td class="number">{short(value)}</td>'
    return f"<td>{escape(short(value))}</td>"


def _bar(value: float, low: float, high: float, top: float) -> str:
    share, left, right = (100 * each / top if top else 0.0 for each in (value, low, high))
    line = f'<b style="left:{left:.1f}%;width:{max(0.0, right - left):.1f}%"></b>'
    return f'<div class="bar"><i style="width:{share:.1f}%"></i>{line}</div>'


def words(key: str) -> str:
    """A key as a person reads it."""
    return " ".join(WORDS.get(part, part) for part in key.split("_")).replace(" per s", "/s")


def short(value: Any) -> str:
    """A value as a person reads it."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value)
