"""Running it: keys, ids, limits, slow clients, failures."""

import asyncio
import json
import logging
import re
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from tests.capture.faults import inject
from tests.server.harness import CONFIG, JSON, SETTINGS, Served, serving, wait_until
from wavegraph.builtin import builtin_path
from wavegraph.engine import Engine
from wavegraph.llm import build_engine
from wavegraph.sampling import SamplingParams
from wavegraph.tokenizer import Tokenizer

COMPLETION: dict[str, Any] = {"model": "builtin", "prompt": "a", "max_tokens": 2, "temperature": 0}
LONG: dict[str, Any] = {**COMPLETION, "max_tokens": 1000, "ignore_eos": True}


class Stream:
    """A streamed completion over a bare socket."""

    def __init__(self, port: int, content: dict[str, Any], receive_buffer: int | None = None) -> None:
        self.socket = socket.socket()
        if receive_buffer is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.socket.settimeout(60)
        self.socket.connect(("127.0.0.1", port))
        body = json.dumps({**content, "stream": True}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\nconnection: close\r\n"
        self.socket.sendall(head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body)
        self.received = b""

    def read(self, until: bytes | None = None) -> bytes:
        """Up to some bytes, or to the end."""
        while until is None or until not in self.received:
            piece = self.socket.recv(65536)
            if not piece:
                break
            self.received += piece
        return self.received

    def events(self) -> list[Any]:
        """What came, comments left out."""
        data = re.findall(rb"data: (.*)\n\n", self.received)
        return [json.loads(each) if each != b"[DONE]" else "[DONE]" for each in data]

    def close(self) -> None:
        self.socket.close()

    def finish(self) -> list[Any]:
        """Read to the end; returns the events."""
        self.read()
        self.close()
        return self.events()


@pytest.fixture
def streams(server: Served) -> Iterator[list[Stream]]:
    opened: list[Stream] = []
    yield opened
    for stream in opened:
        stream.close()


# -- ids and keys ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", ["abc-123", "x" * 128])
def test_a_request_id_is_given_back(server: Served, given: str) -> None:
    _, headers, _ = server.request("GET", "/health", headers={"x-request-id": given})
    assert headers["x-request-id"] == given


@pytest.mark.parametrize("given", [None, "", "x" * 129, "a b", "ü"])
def test_a_request_without_a_usable_id_gets_one(server: Served, given: str | None) -> None:
    headers = {"x-request-id": given.encode().decode("latin-1")} if given is not None else {}
    for path, status in (("/health", 200), ("/nothing", 404)):
        got, answer, _ = server.request("GET", path, headers=headers)
        assert got == status
        assert re.fullmatch("[0-9a-f]{32}", answer["x-request-id"])


def test_an_id_stands_in_the_log(server: Served, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "wavegraph.server.access"):
        server.request("POST", "/v1/completions", json.dumps(COMPLETION).encode(), JSON | {"x-request-id": "find-me"})
        wait_until(lambda: caplog.records, "it is logged")
    (record,) = caplog.records
    fields = record.fields  # type: ignore[attr-defined]
    assert fields["request_id"] == "find-me"
    assert (fields["path"], fields["status"], fields["output_tokens"]) == ("/v1/completions", 200, 2)
    assert (fields["finish_reason"], fields["stream"]) == ("length", False)


def test_a_client_that_left_stands_in_the_log(server: Served, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "wavegraph.server.access"):
        stream = Stream(server.port, LONG)
        stream.read(b"data: ")
        stream.close()
        wait_until(lambda: caplog.records, "it is logged")
    fields = caplog.records[0].fields  # type: ignore[attr-defined]
    assert (fields["status"], fields["sent"], fields["finish_reason"], fields["stream"]) == (499, 200, "abort", True)
    assert fields["output_tokens"] > 0


def test_api_keys(shared_build: Any) -> None:
    with serving(replace(SETTINGS, api_keys=("first", "second")), build=shared_build) as server:
        for path in ("/health", "/version", "/load", "/openapi.json"):
            assert server.request("GET", path)[0] == 200
        for given in (
            None,
            "",
            "first",
            "Bearer",
            "Bearer ",
            "Bearer third",
            "Basic first",
            "Bearer first2",
            "Bearer ü",
        ):
            headers = {"authorization": given.encode().decode("latin-1")} if given is not None else {}
            for method, path in (("GET", "/v1/models"), ("POST", "/v1/completions"), ("GET", "/v1/nothing")):
                status, answer, body = server.request(method, path, headers=headers)
                assert (status, answer["www-authenticate"]) == (401, "Bearer")
                assert json.loads(body)["error"]["code"] == "invalid_api_key"
        for key in ("first", "second"):
            assert server.request("GET", "/v1/models", headers={"authorization": f"Bearer {key}"})[0] == 200


def test_browsers_of_other_origins_are_let_in_only_where_they_are_named(server: Served, shared_build: Any) -> None:
    asked = {"origin": "https://a.example", "access-control-request-method": "POST"}
    assert "access-control-allow-origin" not in server.request("GET", "/health", headers=asked)[1]
    assert server.request("OPTIONS", "/v1/completions", headers=asked)[0] == 405
    settings = replace(SETTINGS, allow_origins=("https://a.example",), api_keys=("key",))
    with serving(settings, build=shared_build) as open_server:
        status, headers, _ = open_server.request("OPTIONS", "/v1/completions", headers=asked)
        assert (status, headers["access-control-allow-origin"]) == (200, "https://a.example")
        assert (
            open_server.request("GET", "/v1/models", headers=asked)[1]["access-control-allow-origin"] == asked["origin"]
        )
        other = {**asked, "origin": "https://b.example"}
        assert "access-control-allow-origin" not in open_server.request("GET", "/health", headers=other)[1]


# -- limits ------------------------------------------------------------------------------------------------


def test_a_full_queue_is_said_so_at_once(shared_build: Any) -> None:
    with serving(replace(SETTINGS, max_pending=4), build=shared_build) as server:
        server.do(server.engine.ready())
        held = [Stream(server.port, {**LONG, "n": 2}) for _ in range(2)]
        for stream in held:
            stream.read(b"data: ")
        assert json.loads(server.request("GET", "/load")[2]) == {"server_load": 4}
        status, headers, body = server.request("POST", "/v1/completions", json.dumps(COMPLETION).encode(), JSON)
        assert (status, headers["retry-after"]) == (429, "1")
        assert json.loads(body)["error"]["code"] == "queue_full"
        for stream in held:
            stream.close()
        server.wait_idle()
        assert server.post("/v1/completions", COMPLETION)[0] == 200


def test_a_request_has_its_time(shared_build: Any) -> None:
    with serving(replace(SETTINGS, request_timeout=0.4), build=shared_build) as server:
        server.do(server.engine.ready())
        status, answer = server.post("/v1/completions", LONG)
        assert (status, answer["error"]["code"]) == (504, "timeout")
        first, *_, error, done = Stream(server.port, LONG).finish()
        assert first["choices"][0]["finish_reason"] is None
        assert (error["error"]["code"], done) == ("timeout", "[DONE]")
        server.wait_idle()
        assert server.free_pages() == CONFIG.num_pages


def test_a_stream_with_nothing_to_say_shows_that_it_lives(shared_build: Any) -> None:
    with serving(replace(SETTINGS, keep_alive=0.05), build=shared_build) as server:
        server.do(server.engine.ready())
        server.on_engine(_slow_steps)
        stream = Stream(server.port, COMPLETION)
        assert stream.finish()[-1] == "[DONE]"
        assert b": keep-alive\n\n" in stream.received


def _slow_steps(engine: Engine) -> None:
    step = engine.step

    def slow() -> Any:
        time.sleep(0.12)
        return step()

    engine.step = slow  # type: ignore[method-assign]


def test_a_client_that_does_not_read_is_dropped_and_harms_nobody(shared_build: Any) -> None:
    with serving(replace(SETTINGS, stall_timeout=0.5), build=shared_build, send_buffer=4096) as server:
        server.do(server.engine.ready())
        alone = server.offline("Reader", max_tokens=80, ignore_eos=True).text
        sleeper = Stream(server.port, {**LONG, "n": 6, "logprobs": 5}, receive_buffer=4096)
        reader = Stream(server.port, {**COMPLETION, "prompt": "Reader", "max_tokens": 80, "ignore_eos": True})
        assert "".join(event["choices"][0]["text"] for event in reader.finish()[:-1]) == alone
        wait_until(lambda: server.engine.unfinished == 0, "the sleeper is dropped", 20)
        assert server.free_pages() == CONFIG.num_pages
        assert server.on_engine(lambda engine: engine.stats().finished["abort"]) == 6
        sleeper.close()


def test_an_answer_that_nobody_reads_is_let_go(shared_build: Any) -> None:
    """Also one that is complete, and so small that it waits in buffers alone."""
    with serving(replace(SETTINGS, stall_timeout=0.5), build=shared_build, send_buffer=4096) as server:
        server.do(server.engine.ready())
        content = {**COMPLETION, "max_tokens": 40, "ignore_eos": True, "logprobs": 20}
        sleeper = Stream(server.port, content, receive_buffer=4096)
        wait_until(lambda: server.engine.unfinished, "it runs")
        server.wait_idle()
        wait_until(lambda: not server.connections, "the connection is dropped", 20)
        sleeper.close()


def test_a_slow_reader_gets_everything_in_larger_pieces(shared_build: Any) -> None:
    with serving(build=shared_build, send_buffer=4096) as server:
        server.do(server.engine.ready())
        options: dict[str, Any] = {"max_tokens": 150, "ignore_eos": True, "logprobs": 20}
        offline = server.offline("Slow", **options)
        content = {**COMPLETION, "prompt": "Slow", "return_token_ids": True, **options}
        reader = Stream(server.port, content, receive_buffer=4096)
        wait_until(lambda: server.engine.unfinished, "it runs")
        server.wait_idle()  # it is all computed before any is read
        choices = [event["choices"][0] for event in reader.finish()[:-1]]
        assert "".join(choice["text"] for choice in choices) == offline.text
        assert [token for choice in choices for token in choice["token_ids"]] == list(offline.token_ids)
        assert len(choices) < 150


def test_long_texts_stop_nobody(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a text is encoded, the event loop and the engine go on."""
    long = "wave follows " * 75_000
    answers: list[Any] = []
    asking = threading.Thread(target=lambda: answers.append(server.post("/tokenize", {"prompt": long})))
    asking.start()
    rounds = 0
    while asking.is_alive():
        assert server.request("GET", "/health")[0] == 200
        server.on_engine(lambda engine: None)
        rounds += 1
    asking.join()
    assert answers[0][0] == 200
    assert rounds > 10
    monkeypatch.delattr(Tokenizer, "encode")  # nor is one encoded whose length alone says too much
    status, answer = server.post("/v1/completions", {**COMPLETION, "prompt": long})
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    assert "at least" in answer["error"]["message"]


def test_connections_are_let_go(server: Served, streams: list[Stream]) -> None:
    """Keep-alive: many requests over one connection, and pipelined ones in order."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: a\r\n\r\nGET /version HTTP/1.1\r\nhost: a\r\n\r\n")
        received = b""
        while received.count(b"HTTP/1.1 200 OK") < 2 or not received.endswith(b"}"):
            received += connection.recv(65536)
        assert received.index(b"status") < received.index(b"version")
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
        while piece := connection.recv(65536):
            received += piece
        assert received.count(b"HTTP/1.1 200 OK") == 3


# -- failures ----------------------------------------------------------------------------------------------


def test_a_step_that_cannot_be_launched_fails_its_requests_alone(server: Served, streams: list[Stream]) -> None:
    streams.append(Stream(server.port, LONG))
    streams[0].read(b"data: ")
    server.on_engine(lambda engine: inject(engine.executor, before={2}))
    streams[0].read()
    error, done = streams[0].events()[-2:]
    assert (error["error"]["code"], error["error"]["type"], done) == ("engine_failed", "server_error", "[DONE]")
    assert server.post("/v1/completions", COMPLETION)[0] == 200
    server.on_engine(lambda engine: inject(engine.executor, before={1}))
    status, answer = server.post("/v1/completions", COMPLETION)
    assert (status, answer["error"]["code"]) == (500, "engine_failed")
    assert server.request("GET", "/health")[0] == 200


def test_a_failing_device_is_heard_of_by_all(caplog: pytest.LogCaptureFixture) -> None:
    with serving() as server:
        server.do(server.engine.ready())
        streams = [Stream(server.port, LONG) for _ in range(3)]
        for stream in streams:
            stream.read(b"data: ")
        plain: list[tuple[int, Any]] = []
        waiting = threading.Thread(target=lambda: plain.append(server.post("/v1/completions", LONG)))
        waiting.start()
        wait_until(lambda: server.engine.unfinished == 4, "all four run")
        server.on_engine(lambda engine: inject(engine.executor, after={5}))
        for stream in streams:
            assert stream.finish()[-2]["error"]["code"] == "engine_failed"
        waiting.join()
        assert plain[0][0] == 500
        assert set(plain[0][1]) == {"error"}
        assert server.request("GET", "/health")[0] == 503
        assert server.request("GET", "/ready")[0] == 503
        status, headers, body = server.request("POST", "/v1/completions", json.dumps(COMPLETION).encode(), JSON)
        assert (status, headers["retry-after"]) == (503, "1")
        for text in (body, *(stream.received for stream in streams), json.dumps(plain[0][1]).encode()):
            assert b"injected" not in text
    assert "injected device error" in caplog.text


def test_while_it_starts_it_lives_and_is_not_ready() -> None:
    gate = threading.Event()

    def build(**progress: Any) -> Engine:
        assert gate.wait(30)
        return build_engine(builtin_path(), CONFIG, **progress)

    with serving(build=build) as server:
        assert server.request("GET", "/health")[0] == 200
        status, headers, body = server.request("GET", "/ready")
        assert (status, headers["retry-after"], json.loads(body)) == (503, "1", {"status": "starting"})
        assert server.post("/v1/completions", COMPLETION)[0] == 503
        gate.set()
        server.do(server.engine.ready())
        assert server.request("GET", "/ready")[0] == 200


def test_it_can_be_stopped_while_it_starts() -> None:
    started = threading.Event()

    def build(**progress: Any) -> Engine:
        started.set()
        time.sleep(0.2)
        return build_engine(builtin_path(), CONFIG, **progress)

    with serving(build=build) as server:
        started.wait(30)
    assert server.engine.engine is None


def test_draining_refuses_what_is_new_and_ends_what_runs(shared_build: Any) -> None:
    with serving(build=shared_build) as server:
        server.do(server.engine.ready())
        stream = Stream(server.port, {**COMPLETION, "max_tokens": 60, "ignore_eos": True})
        stream.read(b"data: ")
        server.do(_drain(server))
        status, answer = server.post("/v1/completions", COMPLETION)
        assert (status, answer["error"]["code"]) == (503, "unavailable")
        assert json.loads(server.request("GET", "/ready")[2]) == {"status": "draining"}
        assert server.request("GET", "/health")[0] == 200
        last, done = stream.finish()[-2:]
        assert (last["choices"][0]["finish_reason"], done) == ("length", "[DONE]")


async def _drain(server: Served) -> None:
    server.engine.drain()


def test_closing_ends_what_runs_with_an_error(shared_build: Any) -> None:
    with serving(build=shared_build) as server:
        server.do(server.engine.ready())
        stream = Stream(server.port, LONG)
        stream.read(b"data: ")
        server.do(server.engine.close())
        assert stream.finish()[-2]["error"]["code"] == "engine_failed"
        assert server.engine.error is None


@pytest.fixture(scope="module")
def shared_build() -> Any:
    return partial(build_engine, builtin_path(), CONFIG)


def test_a_caller_that_gives_up_leaves_nothing_behind(server: Served) -> None:
    async def give_up() -> None:
        adding = asyncio.ensure_future(
            server.engine.generate([[5, 6]], SamplingParams(max_tokens=900, ignore_eos=True))
        )
        await asyncio.sleep(0)
        adding.cancel()
        with pytest.raises(asyncio.CancelledError):
            await adding

    for _ in range(5):
        server.do(give_up())
    assert server.engine.unfinished == 0
    assert server.on_engine(lambda engine: engine.stats().running + engine.stats().waiting) == 0


def test_one_bad_prompt_and_none_is_run(server: Served) -> None:
    before = server.on_engine(lambda engine: engine.stats().prompt_tokens)
    status, answer = server.post("/v1/completions", {**COMPLETION, "prompt": [[1], [2], [10**6]]})
    assert (status, answer["error"]["param"]) == (400, "prompt[2]")
    after = server.on_engine(Engine.stats)
    assert (after.running, after.waiting) == (0, 0)
    assert after.prompt_tokens == before


def test_priorities_reach_the_engine(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    real = Engine.add_request

    def add(*arguments: Any, priority: int = 0) -> list[str]:
        seen.append(priority)
        return real(*arguments, priority=priority)

    monkeypatch.setattr(Engine, "add_request", add)
    for content in (COMPLETION, {**COMPLETION, "priority": -3}):
        assert server.post("/v1/completions", content)[0] == 200
    assert seen == [0, -3]


def test_many_may_wait_for_the_engine_at_once(server: Served) -> None:
    async def ask() -> list[int]:
        return await asyncio.gather(*(server.engine.call(lambda _, n=n: n) for n in range(50)))

    assert server.do(ask()) == list(range(50))
