"""What goes wrong in the work for one request is that request's end, and nobody else's. One fault at each place."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from click.testing import CliRunner

from wavegraph.builtin import builtin_path
from wavegraph.cli import main
from wavegraph.config import EngineConfig
from wavegraph.engine import engine as engine_module
from wavegraph.engine.engine import Engine
from wavegraph.errors import RequestError, RequestFailedError
from wavegraph.llm import LLM, build_engine
from wavegraph.outputs import RequestOutput
from wavegraph.sampling import SamplingParams
from wavegraph.text.stream import OutputText
from wavegraph.text.tokenizer import Tokenizer

CONFIG = EngineConfig(max_num_batched_tokens=16, max_num_seqs=4, max_model_len=128, num_pages=64, check=True)


class Panic(BaseException):
    """Such as the tokenizers library's, which is no `Exception`."""


@pytest.fixture(params=[False, True], ids=["synchronous", "running ahead"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    config = replace(CONFIG, async_scheduling=request.param)
    engine = build_engine(builtin_path(), config, backend="eager")
    yield engine
    engine.close()


def finish(engine: Engine) -> dict[str, RequestOutput]:
    last: dict[str, RequestOutput] = {}
    while engine.has_unfinished:
        last |= {output.request_id: output for output in engine.step()}
    return last


def params(**options: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 8, "ignore_eos": True, **options})


GOOD, BAD = "Waves follow", "Return the sum"


def raising(original: Callable[..., Any], error: BaseException, calls: Callable[[Any], bool], at: int) -> Any:
    """``original``, but the ``at``-th call whose first argument ``calls`` is for raises."""
    count = iter(range(10_000))

    def fail(first: Any, *rest: Any, **named: Any) -> Any:
        if calls(first) and next(count) == at:
            raise error
        return original(first, *rest, **named)

    return fail


def is_bad(text: OutputText) -> bool:
    return "END" in text._stop


Fault = Callable[[pytest.MonkeyPatch, BaseException], None]


def in_text(patch: pytest.MonkeyPatch, error: BaseException) -> None:
    patch.setattr(OutputText, "append", raising(OutputText.append, error, is_bad, 2))


def in_stop_strings(patch: pytest.MonkeyPatch, error: BaseException) -> None:
    patch.setattr(OutputText, "_scan", raising(OutputText._scan, error, is_bad, 3))


def in_the_last_text(patch: pytest.MonkeyPatch, error: BaseException) -> None:
    patch.setattr(OutputText, "finish", raising(OutputText.finish, error, is_bad, 0))


def in_log_probabilities(patch: pytest.MonkeyPatch, error: BaseException) -> None:
    original = engine_module.token_logprob
    count = iter(range(1000))

    def fail(logprobs: Any, row: int, token: int, top: int) -> Any:
        if top == 3 and next(count) == 1:
            raise error
        return original(logprobs, row, token, top)

    patch.setattr(engine_module, "token_logprob", fail)


FAULTS: list[tuple[Fault, dict[str, Any], str]] = [
    (in_text, {}, "text"),
    (in_stop_strings, {}, "text"),
    (in_the_last_text, {}, "text"),
    (in_the_last_text, {"max_tokens": 1}, "text"),
    (in_log_probabilities, {"logprobs": 3}, "logprobs"),
    (in_log_probabilities, {"prompt_logprobs": 3}, "logprobs"),
]


@pytest.mark.parametrize("error", [RuntimeError("odd"), RequestError("odd"), Panic("odd")], ids=repr)
@pytest.mark.parametrize(("fault", "options", "cause"), FAULTS)
def test_a_fault_in_one_requests_work_is_its_own(
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    fault: Fault,
    options: dict[str, Any],
    cause: str,
    error: BaseException,
) -> None:
    good = params(stop=("no such",), logprobs=2, prompt_logprobs=2)
    engine.add_request("alone", GOOD, good)
    alone = finish(engine)["alone"]
    fault(monkeypatch, error)
    engine.add_request("good", GOOD, good)
    engine.add_request("bad", BAD, params(stop=("END",), **options))
    engine.add_request("later", GOOD, good)
    outputs = finish(engine)
    assert outputs["bad"].finish_reason == "error"
    assert type(error).__name__ in (outputs["bad"].error or "")
    assert "odd" not in (outputs["bad"].error or "")  # it may be shown to whoever asked
    for name in ("good", "later"):
        assert (outputs[name].token_ids, outputs[name].text) == (alone.token_ids, alone.text)
        assert outputs[name].prompt_logprobs is not None
    stats = engine.stats()
    assert (stats.failures, stats.finished["error"]) == ({cause: 1}, 1)
    assert stats.free_pages == stats.pages
    assert caplog.text.count("Traceback") == 2  # what was raised, and what it was made of
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    engine.add_request("bad", GOOD, good)  # its name is free, and no fault is left
    assert finish(engine)["bad"].token_ids == alone.token_ids


@pytest.mark.parametrize("error", [RuntimeError("odd"), Panic("odd")], ids=repr)
@pytest.mark.parametrize(
    ("owner", "name", "at"),
    [(Tokenizer, "encode", 0), (Tokenizer, "stream", 1), (SamplingParams, "device_params", 2)],
)
def test_a_fault_at_the_door_refuses_one_request(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, at: int, error: BaseException
) -> None:
    engine.add_request("good", GOOD, params())
    engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, raising(getattr(owner, name), error, lambda _: True, at))
        with pytest.raises(RequestFailedError, match="taking it in failed"):
            engine.add_request("bad", BAD, params(n=3))
    assert len(finish(engine)["good"].token_ids) == 8
    stats = engine.stats()
    assert (stats.failures, stats.free_pages, stats.prompt_tokens) == ({"admission": 1}, stats.pages, len(_ids(engine)))


def _ids(engine: Engine) -> list[int]:
    assert engine.tokenizer is not None
    return engine.tokenizer.encode(GOOD)


def test_a_fault_in_one_of_many_prompts_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(builtin_path(), CONFIG, backend="eager") as llm:
        in_text(monkeypatch, Panic("odd"))
        stop = [params(), params(stop=("END",)), params()]
        outputs = llm.generate([GOOD, BAD, GOOD], stop)
        assert [output.finish_reason for output in outputs] == ["length", "error", "length"]
        in_text(monkeypatch, Panic("odd"))
        *_, last = llm.stream(BAD, params(stop=("END",)))
        assert last.finish_reason == "error"


def test_a_request_that_is_handed_over_fails_alone(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.add_request("bad", BAD, params(stop=("END",)))
    while not any(output.token_ids for output in engine.step()):
        pass
    state = engine.export_request("bad")
    with monkeypatch.context() as patch:
        patch.setattr(OutputText, "append", raising(OutputText.append, Panic("odd"), is_bad, 0))
        with pytest.raises(RequestFailedError):
            engine.import_request(state)
    assert not engine.has_unfinished
    engine.import_request(state)
    assert finish(engine)["bad"].finish_reason == "length"


SMALL = ("--max-model-len", "64", "--max-batched-tokens", "16", "--max-num-seqs", "2", "--max-tokens", "4")


def test_the_command_line_prints_what_is_whole_and_says_what_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    append = OutputText.append
    monkeypatch.setattr(OutputText, "append", raising(append, Panic("odd"), lambda _: True, 1))
    result = CliRunner().invoke(main, ["generate", "builtin", "--prompt", GOOD, "--prompt", BAD, *SMALL])
    assert result.exit_code == 1
    assert "1 of 2 outputs failed: request '" in result.stderr
    assert GOOD in result.stdout
    monkeypatch.setattr(OutputText, "append", raising(append, Panic("odd"), lambda _: True, 0))
    result = CliRunner().invoke(main, ["chat", "builtin", *SMALL], input="a\nb\n")
    assert result.exit_code == 0
    assert "Error: request '0': making its text failed (Panic)" in result.stderr
    assert result.stdout.endswith("\n")  # the second answer
