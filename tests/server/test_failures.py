"""What fails, who hears of it, and what is left behind: nothing."""

import asyncio
import json
import threading
import time
from typing import Any

import pytest

from tests.capture.faults import inject
from tests.server.harness import COMPLETION, CONFIG, JSON, LONG, Served, Stream, serving, wait_until
from wavegraph.builtin import builtin_path
from wavegraph.engine.engine import Engine
from wavegraph.sampling import SamplingParams
from wavegraph.server.logprobs import TokenNames
from wavegraph.startup.build import build_engine
from wavegraph.text.chat import ChatTemplate
from wavegraph.text.stream import OutputText
from wavegraph.text.tokenizer import Tokenizer


def test_a_step_that_cannot_be_launched_fails_its_requests_alone(server: Served, streams: list[Stream]) -> None:
    streams.append(Stream(server.port, LONG))
    streams[0].read(b"data: ")
    server.on_engine(lambda engine: inject(engine.executor, before={2}))
    streams[0].read()
    error, done = streams[0].events()[-2:]
    assert (error["error"]["code"], error["error"]["type"], done) == ("request_failed", "server_error", "[DONE]")
    assert server.post("/v1/completions", COMPLETION)[0] == 200
    server.on_engine(lambda engine: inject(engine.executor, before={1}))
    status, answer = server.post("/v1/completions", COMPLETION)
    assert (status, answer["error"]["code"]) == (500, "request_failed")
    assert server.request("GET", "/health")[0] == 200


class Panic(BaseException):
    """Such as the tokenizers library's, which is no `Exception`."""


@pytest.mark.parametrize(
    ("owner", "name", "options"),
    [
        (OutputText, "append", {}),
        (OutputText, "finish", {}),
        (TokenNames, "name", {"logprobs": 1}),
    ],
)
def test_what_fails_in_one_requests_own_work_is_heard_of_by_it_alone(
    server: Served,
    streams: list[Stream],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    owner: Any,
    name: str,
    options: dict[str, Any],
) -> None:
    streams.append(Stream(server.port, {**COMPLETION, "max_tokens": 100, "ignore_eos": True}))
    streams[0].read(b"data: ")
    asked = {**COMPLETION, "prompt": "b", "stop": "END", **options}
    original = getattr(owner, name)

    def fail(self: Any, *given: Any) -> Any:
        if owner is TokenNames or self._stop:
            raise Panic("odd")
        return original(self, *given)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fail)
        status, answer = server.post("/v1/completions", asked)
        assert (status, answer["error"]["code"], answer["error"]["type"]) == (500, "request_failed", "server_error")
        bad = Stream(server.port, asked).finish()
        assert (bad[-2]["error"]["code"], bad[-1]) == ("request_failed", "[DONE]")
        assert "odd" not in str((answer, bad))
    assert server.post("/v1/completions", asked)[0] == 200
    *_, last, done = streams[0].finish()
    assert (last["choices"][0]["finish_reason"], done) == ("length", "[DONE]")
    assert "odd" in caplog.text


def test_what_fails_before_a_request_is_taken_in_is_heard_of_by_it_alone(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*given: Any, **named: Any) -> Any:
        raise Panic("odd")

    for owner, name in ((Tokenizer, "encode"), (ChatTemplate, "render"), (SamplingParams, "device_params")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, fail)
            path = "/v1/chat/completions" if name == "render" else "/v1/completions"
            asked = {**COMPLETION, "messages": [{"role": "user", "content": "a"}]}
            status, answer = server.post(path, asked)
        assert (status, answer["error"]["code"]) == (500, "request_failed")
    assert server.post("/v1/completions", COMPLETION)[0] == 200
    page = server.request("GET", "/metrics")[2].decode()
    assert 'wavegraph:request_failures_total{cause="admission",model_name="builtin"} 1.0' in page


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
