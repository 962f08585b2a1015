"""Running it: keys, ids, limits, slow clients, failures."""

import json
import logging
import re
import socket
import threading
import time
from dataclasses import replace
from typing import Any

import pytest

from tests.server.harness import COMPLETION, CONFIG, JSON, LONG, SETTINGS, Served, Stream, serving, wait_until
from wavegraph.engine.engine import Engine
from wavegraph.text.tokenizer import Tokenizer

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
