"""Logs, one line an event, as ``key=value`` text or as JSON. What an event carries is in its ``fields``."""

import json
import logging
import re
from datetime import UTC, datetime
from typing import Any

_PLAIN = re.compile(r"[^\s\"=\\\x00-\x1f\x7f]+")


def set_up_logging(form: str, level: str) -> None:
    """Send the logs of Wavegraph and uvicorn to stderr, and nowhere else."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    for name in ("wavegraph", "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.propagate = False
        # Its word on every start and stop says what we say ourselves.
        logger.setLevel(level.upper() if name == "wavegraph" else "WARNING")


class JsonFormatter(logging.Formatter):
    """A JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        """One event."""
        entry = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


class TextFormatter(logging.Formatter):
    """Time, level, message, and fields as ``key=value``; values that could be misread are quoted."""

    def format(self, record: logging.LogRecord) -> str:
        """One event."""
        fields = "".join(f" {name}={_quoted(value)}" for name, value in _fields(record).items())
        message = record.getMessage().replace("\n", "\\n").replace("\r", "\\r")
        line = f"{_time(record)} {record.levelname:<7} {message}{fields}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    fields: dict[str, Any] = getattr(record, "fields", {})
    return fields


def _quoted(value: Any) -> str:
    text = str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text)
