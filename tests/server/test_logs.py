"""One event, one line."""

import json
import logging
import sys
from typing import Any

import pytest

from wavegraph.server.logs import JsonFormatter, TextFormatter


def record(message: str, fields: dict[str, Any], error: bool = False) -> logging.LogRecord:
    exc_info: Any = None
    if error:
        try:
            raise ValueError("inside")
        except ValueError:
            exc_info = sys.exc_info()
    made = logging.LogRecord("wavegraph.x", logging.INFO, "", 0, message, None, exc_info)
    made.created = 1_796_053_355.25
    made.fields = fields
    return made


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("plain/path?x", "plain/path?x"),
        (200, "200"),
        (0.5, "0.5"),
        ("two words", '"two words"'),
        ('a"b', r'"a\"b"'),
        ("a=b", '"a=b"'),
        ("line\nend", r'"line\nend"'),
        ("\x1b[31m", r'"\u001b[31m"'),
        ("", '""'),
    ],
)
def test_text(value: Any, shown: str) -> None:
    line = TextFormatter().format(record("request\nforged", {"field": value}))
    assert line == rf"2026-11-30T15:42:35.250Z INFO    request\nforged field={shown}"


def test_json() -> None:
    line = JsonFormatter().format(record("request", {"path": "/a\nb", "status": 200, "odd": object}))
    assert "\n" not in line
    entry = json.loads(line)
    assert entry["time"] == "2026-11-30T15:42:35.250Z"
    assert (entry["level"], entry["logger"], entry["message"]) == ("info", "wavegraph.x", "request")
    assert (entry["path"], entry["status"]) == ("/a\nb", 200)


@pytest.mark.parametrize("formatter", [TextFormatter(), JsonFormatter()])
def test_errors_come_with_their_traceback(formatter: logging.Formatter) -> None:
    assert "ValueError: inside" in formatter.format(record("failed", {}, error=True))
