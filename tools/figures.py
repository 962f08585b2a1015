"""Fill a Markdown page with results of benchmarks: ``python -m tools.figures PAGE FOLDER``.

Between ``<!-- figures: NAME -->`` and ``<!-- end -->`` stand the tables of FOLDER/NAME.json, if that is there.
"""

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from wavegraph.bench.report import FACTS, SHARES, read_result, short, words

SECTION = re.compile(r"(<!-- figures: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)

MISSING = "Not measured yet.\n"


def fill(page: str, folder: Path) -> str:
    """``page`` with the results in ``folder`` in their places. Raises `ConfigError` for a file that holds none."""

    def section(match: re.Match[str]) -> str:
        file = folder / f"{match[2]}.json"
        return match[1] + (markdown(read_result(file)) if file.exists() else MISSING) + match[3]

    return SECTION.sub(section, page)


def markdown(result: Mapping[str, Any]) -> str:
    """The tables of a result, and where it is from."""
    facts = ", ".join(f"{key} {short(result[key])}" for key in FACTS if result.get(key) is not None)
    return "\n".join([*_tables("", [result]), f"({facts})", ""])


def _tables(title: str, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Tables in ``rows``, which are objects that hold some, or else the table that they are."""
    parts = []
    for row in rows:
        for key, value in row.items():
            if isinstance(value, list) and value and isinstance(value[0], dict):
                if any(isinstance(each, list) and each and isinstance(each[0], dict) for each in value[0].values()):
                    parts += _tables("", value)
                else:
                    parts += [_title(row, key), "", *_table(value), ""]
    return parts


def _title(row: Mapping[str, Any], key: str) -> str:
    if "workload" in row and "requests" in row:
        return f"{row['workload']}: {row['requests']} requests, {row['prompt_tokens']} prompt tokens"
    return words(key).capitalize()


def _table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    columns = [column for column in rows[0] if not isinstance(rows[0][column], list)]
    lines = [[words(column) for column in columns], ["---"] * len(columns)]
    lines += [[_cell(column, row[column]) for column in columns] for row in rows]
    return [f"| {' | '.join(line)} |" for line in lines]


def _cell(column: str, value: Any) -> str:
    if isinstance(value, dict):
        first, *others = value.values()
        return f"{short(first)} ({', '.join(map(short, others))})"
    return f"{value:.1%}" if column in SHARES else short(value)


def main() -> None:
    """Fill the page in place."""
    page, folder = Path(sys.argv[1]), Path(sys.argv[2])
    page.write_text(fill(page.read_text(encoding="utf-8"), folder), encoding="utf-8")


if __name__ == "__main__":
    main()
