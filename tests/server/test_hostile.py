"""Bodies that nobody should send: each is answered by an error object that names the field, and the server goes on."""

import json
import re
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.harness import JSON, Served

COMPLETIONS, CHAT, TOKENIZE, DETOKENIZE = "/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"
COMPLETION: dict[str, Any] = {"model": "builtin", "prompt": "a", "max_tokens": 1}
TURN: dict[str, Any] = {"role": "user", "content": "a"}
CONVERSATION: dict[str, Any] = {"model": "builtin", "messages": [TURN], "max_tokens": 1}

DEEP = 100_000
HUGE = 10**400
LONE = "\ud800"

Case = tuple[str, bytes, int, str]
"""Path, body, status, and the field that the error must name."""


NUMBERS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
INTEGERS = ("max_tokens", "min_tokens", "n", "seed", "top_k", "priority", "prompt_logprobs", "max_loops", "min_loops")
FLAGS = ("stream", "ignore_eos", "skip_special_tokens", "include_stop_str_in_output", "return_token_ids")
FIELDS: list[tuple[tuple[str, ...], list[Any]]] = [
    ((*NUMBERS, "exit_threshold"), ["1", [1], {}, True, HUGE, -HUGE, float("nan"), float("inf"), -1e9]),
    ((*INTEGERS, "exit_at_step"), ["1", [1], 1.5, True, HUGE, -HUGE]),
    ((*FLAGS, "return_exit_depths"), ["true", 1, [], {}]),
    (("max_tokens", "n", "max_loops", "min_loops"), [0, -1]),
    (("n",), [129]),
    (("top_p",), [0, 1.01]),
    (("top_k",), [-2]),
    (("min_p",), [2]),
    (("seed",), [2**63]),
    (("repetition_penalty",), [0]),
    (("prompt_logprobs",), [21]),
    (("max_loops", "min_loops", "exit_at_step"), [5, 2**31]),
    (("min_tokens",), [2]),
    (("exit_kv",), ["none", 1, ["exact"]]),
    (("stop",), [1, {}, "", ["a", ""], [1], [["a"]], ["x"] * 17, [LONE], True]),
    (("stop_token_ids",), ["1", [-1], ["1"], [1.0], [HUGE], [99999], [1] * 17, {"1": 1}, [True], [None]]),
    (("logit_bias",), [[], "1", {"a": 1}, {"1": "x"}, {"1": 101}, {"-1": 1}, {"1.5": 1}, {"99999": 1}, {"1": HUGE}]),
    (("logit_bias",), [{"": 1}, {"²": 1}, {"1": None}, {"1": float("nan")}, {LONE: 1}]),
    (("logit_bias",), [{str(token): 1 for token in range(65)}]),
    (("model",), [1, None, [], {}, True]),
    (("stream_options",), [1, [], "include_usage", {"include_usage": 1}, {"include_usage": None}]),
    (("tools",), [[{"type": "function"}], {}, 1]),
    (("functions",), [[{}]]),
    (("response_format",), [{"type": "json_object"}]),
    (("suffix",), ["b"]),
    (("best_of",), [3]),
    (("modalities",), [["audio"]]),
    (("chat_template",), ["{{ ''.__class__.__mro__ }}"]),
]
"""Fields of either kind of request, and values that they must not have."""


def prompts() -> Iterator[Any]:
    yield from (None, "", [], {}, 1, True, [[]], [""], [["a"]], ["a", 1], ["a", [1]], [1, "a"], [1, None], [1.0])
    yield from ([-1], [10**6], [HUGE], [[1], [2, -3]], [True], [[[1]]], LONE, ["a", LONE], [1] * 1024, "wave " * 3000)
    yield ["a"] * 1025


def conversations() -> Iterator[tuple[Any, str]]:
    for value in (None, [], {}, "hi", 1, True):
        yield value, "messages"
    for turn in (None, 1, "hi", [], True):
        yield [turn], "messages[0]"
    for role in (None, 1, "", "root", ["user"], "user\n<|im_end|>", {}, LONE):
        yield [{**TURN, "role": role}], "messages[0].role"
    for content in (None, 1, {}, True, HUGE):
        yield [TURN, {**TURN, "content": content}], "messages[1].content"
    for part in (None, 1, [], True):
        yield [{**TURN, "content": [part]}], "messages[0].content[0]"
    for kind in ("image_url", "input_audio", None, 1, {}):
        yield [{**TURN, "content": [{"type": kind, "text": "a"}]}], "messages[0].content[0].type"
    for text in (None, 1, [], {}):
        yield [{**TURN, "content": [{"type": "text", "text": text}]}], "messages[0].content[0].text"
    yield [{"role": "user"}], "messages[0].content"
    yield [{"content": "a"}], "messages[0].role"
    yield [{**TURN, "content": LONE}], "messages"
    yield [{**TURN, "content": "wave " * 3000}], "messages"


def raw() -> Iterator[tuple[bytes, int, str]]:
    """Bodies that are no JSON, or no object."""
    whole = json.dumps(COMPLETION).encode()
    for body in (b"", b" ", b"{", b"}", whole[:-1], whole + b"x", b"[]", b"null", b"1", b'"text"', b"true", b"NaN"):
        yield body, 400, "body"
    for body in (
        b"\xff\xfe\x00",
        b'{"model": "\xff"}',
        b"\x00" * 100,
        b"\x1f\x8b\x08\x00",
        b"--boundary\r\n",
        b"<xml/>",
    ):
        yield body, 400, "body"
    yield b"[" * DEEP + b"]" * DEEP, 400, "body"
    yield b'{"a":' * DEEP + b"1" + b"}" * DEEP, 400, "body"
    yield b'{"model": "builtin", "prompt": ' + b"[" * DEEP + b"]" * DEEP + b"}", 400, "body"
    yield b'{"model": "builtin", "max_tokens": ' + b"9" * 5000 + b"}", 400, "body"
    yield b'{"model": "builtin", "prompt": "a", "temperature": 1e400}', 400, "temperature"
    yield b'{"model": "builtin", "prompt": "a", "temperature": -Infinity}', 400, "temperature"
    yield b'{"model": "builtin", "prompt": "\xed\xa0\x80"}', 400, "prompt"
    yield b'{"model": "builtin", "prompt": "\\ud800"}', 400, "prompt"
    yield b'{"model": "\\udfff", "prompt": "a"}', 404, "model"
    yield b'{"model": "builtin", "prompt": "' + b"a" * (10 << 20) + b'"}', 413, "body"
    yield b'{"model": "builtin", "prompt": [' + b"1," * (5 << 20) + b"1]}", 413, "body"
    yield b'{"model": "builtin", "prompt": [' + b"1," * 200_000 + b"1]}", 400, "prompt"
    yield b'{"model": "builtin", "prompt": "' + b"\\u0000" * 100_000 + b'"}', 400, "prompt"


def encoded(content: Any) -> bytes:
    return json.dumps(content).encode()


def completions() -> Iterator[tuple[bytes, int, str]]:
    for value in prompts():
        yield encoded({**COMPLETION, "prompt": value}), 400, "n" if value == ["a"] * 1025 else "prompt"
    for names, values in FIELDS:
        yield from ((encoded({**COMPLETION, name: value}), 400, name) for name in names for value in values)
    for name in ("model", "prompt"):
        yield encoded({key: value for key, value in COMPLETION.items() if key != name}), 400, name
    for value in (-1, 21, "1", True, 1.5):
        yield encoded({**COMPLETION, "logprobs": value}), 400, "logprobs"
    yield encoded({**COMPLETION, "logprobs": 1, "echo": True, "stream": True}), 400, "logprobs"
    yield encoded({**COMPLETION, "echo": "yes"}), 400, "echo"
    yield from together(COMPLETION)
    yield from raw()


def chats() -> Iterator[tuple[bytes, int, str]]:
    for value, field in conversations():
        yield encoded({**CONVERSATION, "messages": value}), 400, field
    yield encoded({"model": "builtin"}), 400, "messages"
    yield encoded(COMPLETION), 400, "messages"
    for value in (1, "yes", []):
        yield encoded({**CONVERSATION, "logprobs": value}), 400, "logprobs"
    for value in (-1, 21, "1", True):
        yield encoded({**CONVERSATION, "logprobs": True, "top_logprobs": value}), 400, "top_logprobs"
    yield encoded({**CONVERSATION, "top_logprobs": 2}), 400, "top_logprobs"
    for value in (0, -1, "1", 1.5, HUGE):
        yield encoded({**CONVERSATION, "max_completion_tokens": value}), 400, "max_completion_tokens"
    yield from together(CONVERSATION)
    yield from (case for case in raw() if case[2] == "body")


def together(content: dict[str, Any]) -> Iterator[tuple[bytes, int, str]]:
    """What does not exist, or does not go together."""
    for name in ("gpt-4", "", "../../etc/passwd", "builtin\n", "x" * 100_000, "{{ 7 * 7 }}", LONE):
        yield encoded({**content, "model": name}), 404, "model"
    yield encoded({**content, "exit_at_step": 1, "max_loops": 2}), 400, "exit_at_step"
    yield encoded({**content, "min_loops": 3, "max_loops": 2}), 400, "min_loops"
    yield encoded({**content, "stream": True, "prompt_logprobs": 1}), 400, "prompt_logprobs"


def tokenizers() -> Iterator[Case]:
    for content, field in (({}, "prompt"), ({"prompt": 1}, "prompt"), ({"prompt": LONE}, "prompt")):
        yield TOKENIZE, encoded(content), 400, field
    yield TOKENIZE, encoded({"prompt": "a", "messages": [TURN]}), 400, "prompt"
    yield TOKENIZE, encoded({"messages": [1]}), 400, "messages[0]"
    yield TOKENIZE, encoded({"prompt": "a", "add_special_tokens": 1}), 400, "add_special_tokens"
    for value in (None, "a", ["a"], [-1], [HUGE], [True], {}, [99999]):
        yield DETOKENIZE, encoded({"tokens": value}), 400, "tokens"


def cases() -> Iterator[Case]:
    yield from ((COMPLETIONS, *case) for case in completions())
    yield from ((CHAT, *case) for case in chats())
    yield from tokenizers()


CASES = list(cases())
SECRETS = re.compile(rb"Traceback|File \"|\.py\b|/tmp|/root|/home|site-packages|0x[0-9a-f]{6}")


def check_error(status: int, body: bytes, expected: int, field: str) -> None:
    assert status == expected, body[:300]
    assert not SECRETS.search(body), body
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] is not None, error
    assert error["param"].partition("[")[0].partition(".")[0] == field.partition("[")[0].partition(".")[0], error
    assert error["param"].startswith(field), error
    assert field in error["message"], error
    assert len(body) < 600


def test_there_are_many() -> None:
    assert len(CASES) >= 150


@pytest.mark.parametrize("part", range(8))
def test_hostile_bodies(server: Served, part: int) -> None:
    for path, body, status, field in CASES[part::8]:
        got, headers, content = server.request("POST", path, body, JSON)
        assert headers["content-type"] == "application/json"
        check_error(got, content, status, field)
    status, answer = server.post(COMPLETIONS, {**COMPLETION, "temperature": 0})
    assert (status, answer["usage"]["completion_tokens"]) == (200, 1)


@pytest.mark.parametrize(
    "text",
    ["{{ 7 * 7 }}", "{% for x in range(10**9) %}{% endfor %}", "{{ ''.__class__.__mro__[1].__subclasses__() }}", "{#"],
)
def test_what_messages_say_is_no_template(server: Served, text: str) -> None:
    messages = [{"role": "user", "content": text, "name": text}]
    status, answer = server.post(TOKENIZE, {"messages": messages})
    assert status == 200
    assert server.post(DETOKENIZE, {"tokens": answer["tokens"]})[1]["prompt"].count(text) == 1


@pytest.mark.parametrize(
    ("method", "path", "status", "field"),
    [
        ("GET", "/", 404, "path"),
        ("GET", "/v1/completions", 405, "method"),
        ("DELETE", "/v1/models", 405, "method"),
        ("GET", "/v1/models/other", 404, "model"),
        ("GET", "/v1/models/../../etc/passwd", 404, "model"),
        ("GET", "/docs", 404, "path"),
        ("POST", "/v1/completions/", 404, "path"),
        ("GET", "/%00", 404, "path"),
        ("GET", "/v1/embeddings", 404, "path"),
    ],
)
def test_wrong_paths_and_methods(server: Served, method: str, path: str, status: int, field: str) -> None:
    got, _, body = server.request(method, path)
    check_error(got, body, status, field)


@pytest.mark.parametrize("media", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "x" * 999])
def test_other_kinds_of_content(server: Served, media: str) -> None:
    status, _, body = server.request("POST", COMPLETIONS, json.dumps(COMPLETION).encode(), {"content-type": media})
    check_error(status, body, 415, "content-type")


def talk(port: int, sent: bytes, seconds: float = 10) -> bytes:
    """Send bytes as they are, and read to the end."""
    with socket.create_connection(("127.0.0.1", port), timeout=seconds) as connection:
        connection.sendall(sent)
        received = b""
        while piece := connection.recv(65536):
            received += piece
        return received


def split(answer: bytes) -> tuple[int, bytes]:
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), body


POST = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\nconnection: close\r\n"
HALF_SENT = [
    (b"", 408, "headers"),
    (b"POST /v1/compl", 408, "headers"),
    (POST, 408, "headers"),
    (b"\r\n\r\n", 408, "headers"),
    (POST + b'content-length: 100\r\n\r\n{"model":', 408, "body"),
    (POST + b'transfer-encoding: chunked\r\n\r\n5\r\n{"mod\r\n', 408, "body"),
    (POST + b"content-length: 99999999999999999999999999\r\n\r\n{", 400, "request"),
    (POST + b"content-length: 99999999\r\n\r\n{", 413, "body"),
    (b"GARBAGE\r\n\r\n", 400, "request"),
    (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400, "request"),  # TLS
    (POST + b"content-length: -5\r\n\r\n{}", 400, "request"),
    (POST + b"transfer-encoding: chunked\r\n\r\nXYZ\r\n", 400, "request"),
    (POST + b"x: " + b"a" * 200_000, 431, "headers"),
    (b"GET /\xff HTTP/1.1\r\n\r\n", 400, "request"),
]


@pytest.mark.parametrize(("sent", "status", "field"), HALF_SENT)
def test_half_sent_requests_come_to_an_end(server: Served, sent: bytes, status: int, field: str) -> None:
    got, body = split(talk(server.port, sent))
    check_error(got, body, status, field)


def test_a_request_sent_byte_by_byte_has_no_more_time(server: Served) -> None:
    body = json.dumps(COMPLETION).encode()
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(POST + b"content-length: %d\r\n\r\n" % len(body))
        began = time.monotonic()
        for byte in body[:-1]:
            if time.monotonic() > began + 0.9:
                break
            connection.sendall(bytes([byte]))
            time.sleep(0.05)
        check_error(*split(connection.recv(65536)), 408, "body")


def test_a_body_in_chunks_has_the_same_limit(server: Served) -> None:
    chunk = b"10000\r\n" + b"a" * 65536 + b"\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(POST + b"transfer-encoding: chunked\r\n\r\n" + chunk * 17)
        check_error(*split(connection.recv(65536)), 413, "body")
