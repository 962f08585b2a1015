"""The program itself: how it starts, and how it ends."""

import json
import logging
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.server.harness import JSON, LONG, Served, Stream
from wavegraph.cli import main

ROOT = Path(__file__).parents[2]
SMALL = ("--max-batched-tokens", "16", "--max-num-seqs", "4", "--max-model-len", "1024", "--port", "0")
JSON_LOGS = ("--log-format", "json")


class Program:
    """``wavegraph serve`` in a process of its own, and the lines of its log as they come."""

    def __init__(self, *arguments: str, code: str = "from wavegraph.cli import main; main()") -> None:
        command = [sys.executable, "-c", code, "serve", "builtin", *SMALL, *JSON_LOGS, *arguments]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, cwd=ROOT, env=environment, text=True)
        self.lines: list[str] = []
        self._queue: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._queue.put(line)
        self._queue.put(None)

    def wait_for(self, message: str) -> dict[str, Any]:
        """The next log entry with this message."""
        while (line := self._queue.get(timeout=60)) is not None:
            self.lines.append(line)
            if line.startswith("{") and json.loads(line)["message"].startswith(message):
                entry: dict[str, Any] = json.loads(line)
                return entry
        pytest.fail("the program ended:\n" + "".join(self.lines))

    def ready(self) -> Served:
        address = self.wait_for("ready")["address"]
        return Served(None, int(address.rpartition(":")[2]), None)  # type: ignore[arg-type]

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self, seconds: float = 30) -> int:
        """Wait for its end; returns the exit code."""
        code = self.process.wait(seconds)
        while (line := self._queue.get(timeout=10)) is not None:
            self.lines.append(line)
        return code


@contextmanager
def program(*arguments: str, **options: str) -> Iterator[Program]:
    running = Program(*arguments, **options)
    try:
        yield running
    finally:
        running.process.kill()
        running.process.wait()
        running._reader.join()
        assert running.process.stderr is not None
        running.process.stderr.close()


@pytest.mark.slow
def test_its_start_is_told() -> None:
    with program() as served:
        server = served.ready()
        messages = [json.loads(line)["message"] for line in served.lines if line.startswith("{")]
        assert any(re.fullmatch(r"starting: loading weights, \d+ of \d+", message) for message in messages)
        assert any(re.fullmatch(r"starting: recording buckets, (\d+) of \1", message) for message in messages)
        ready = json.loads(served.lines[-1])
        assert ready["ladder"] == "1,2,4,8,12,16"
        assert ready["tokens"] == ready["pages"] * 16
        assert ready["pool_bytes"] > 0
        assert server.request("GET", "/ready")[0] == 200
        served.signal(signal.SIGTERM)
        assert served.end() == 0


def test_sigterm_lets_streams_end_and_refuses_what_is_new() -> None:
    with program("--drain-seconds", "30") as served:
        server = served.ready()
        streams = [Stream(server.port, {**LONG, "max_tokens": 150}) for _ in range(4)]
        for stream in streams:
            stream.read(b"data: ")
        served.signal(signal.SIGTERM)
        served.wait_for("draining")
        status, headers, body = server.request("POST", "/v1/completions", json.dumps(LONG).encode(), JSON)
        assert (status, headers["retry-after"]) == (503, "1")
        assert json.loads(body)["error"]["code"] == "unavailable"
        assert server.request("GET", "/ready")[0] == 503
        for stream in streams:
            last, done = stream.finish()[-2:]
            assert (last["choices"][0]["finish_reason"], done) == ("length", "[DONE]")
        assert served.end() == 0


@pytest.mark.slow
def test_the_drain_limit_cuts_off_what_still_runs() -> None:
    with program("--drain-seconds", "0.3") as served:
        server = served.ready()
        stream = Stream(server.port, {**LONG, "n": 4})
        stream.read(b"data: ")
        began = time.monotonic()
        served.signal(signal.SIGTERM)
        error, done = stream.finish()[-2:]
        assert (error["error"]["type"], done) == ("server_error", "[DONE]")
        assert served.end() == 0
        assert time.monotonic() < began + 15


@pytest.mark.slow
def test_a_second_signal_does_not_wait() -> None:
    with program() as served:
        server = served.ready()
        stream = Stream(server.port, {**LONG, "n": 4})
        stream.read(b"data: ")
        served.signal(signal.SIGINT)
        served.wait_for("draining")
        served.signal(signal.SIGINT)
        assert "error" in stream.finish()[-2]
        assert served.end() == 130


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_while_it_starts(number: int, code: int) -> None:
    with program() as served:
        served.wait_for("starting: loading weights")
        served.signal(number)
        assert served.end() == code
        assert "Traceback" not in "".join(served.lines)


FAILING = """
import wavegraph.startup.build
from tests.capture.faults import inject
from wavegraph.cli import main

real = wavegraph.startup.build.build_engine

def build(*arguments, **options):
    engine = real(*arguments, **options)
    inject(engine.executor, after={60})
    return engine

wavegraph.startup.build.build_engine = build
main()
"""


def test_a_failed_device_ends_the_process() -> None:
    with program(code=FAILING) as served:
        server = served.ready()
        stream = Stream(server.port, LONG)
        assert stream.finish()[-2]["error"]["code"] == "engine_failed"
        assert server.request("GET", "/health")[0] == 503
        assert served.end() == 1
        failure = next(json.loads(line) for line in served.lines if "the engine failed" in line)
        assert "injected device error" in failure["exception"]


@pytest.fixture
def _logging_as_it_was() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in ("wavegraph", "uvicorn")]
    before = [(logger, logger.handlers[:], logger.propagate, logger.level) for logger in loggers]
    yield
    for logger, handlers, propagate, level in before:
        logger.handlers[:] = handlers
        logger.propagate = propagate
        logger.setLevel(level)


def run(*arguments: str) -> Any:
    return CliRunner().invoke(main, ["serve", *arguments])


@pytest.mark.usefixtures("_logging_as_it_was")
def test_what_cannot_be_served_is_exit_code_2(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for arguments, named in (
            (("builtin", "--port", port), f"port: 127.0.0.1:{port} cannot be listened on"),
            (("builtin", "--host", "no.such.host.invalid"), "host: 'no.such.host.invalid' is no address"),
            (("builtin", "--port", "70000"), "70000 is not in the range"),
            (("builtin", "--max-pending", "0"), "max_pending must be an integer of at least 1, got 0"),
            (("builtin", "--request-timeout", "0"), "request_timeout must be a number of seconds above 0"),
            (("builtin", "--api-key", "ü"), "api_keys must be printable ASCII"),
            (("builtin", "--chunk", "0"), "prefill_chunk_size must be an integer of at least 1"),
            ((str(tmp_path), "--port", "0"), "config.json: no such file"),
            (("builtin", "--port", "0", "--dtype", "int4"), "dtype: must be"),
        ):
            result = run(*arguments)
            assert result.exit_code == 2, result.output
            assert named in result.stderr.replace("\n", " ")
            assert "Traceback" not in result.stderr


@pytest.mark.usefixtures("_logging_as_it_was")
def test_a_folder_is_served_under_its_name_not_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr("wavegraph.server.serve.serve", lambda build, settings, *_, **__: seen.append(settings) or 0)
    (tmp_path / "my-model").mkdir()
    monkeypatch.setenv("WAVEGRAPH_API_KEY", "one two")
    for arguments in ((str(tmp_path / "my-model"),), ("a/b",), ("builtin", "--served-model-name", "c")):
        assert run(*arguments, "--port", "0").exit_code == 0
    assert [settings.model_name for settings in seen] == ["my-model", "a/b", "c"]
    assert seen[0].api_keys == ("one", "two")
