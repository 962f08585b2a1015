"""The door, failures and ends of requests. Small goldens, the eager backend."""

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from wavegraph.config import EngineConfig
from wavegraph.engine.engine import Engine
from wavegraph.errors import CaptureError, EngineError, RequestError
from wavegraph.outputs import RequestOutput
from wavegraph.sampling import SamplingParams
from wavegraph.startup.build import build_engine

GOLDENS = Path(__file__).parents[1] / "goldens"
CONFIG = EngineConfig(
    prefill_chunk_size=3,
    max_num_batched_tokens=8,
    max_num_seqs=3,
    max_model_len=40,
    page_size=4,
    num_pages=24,
    check=True,
)

with np.load(GOLDENS / "tiny_fp32.npz") as arrays:
    PROMPT = arrays["gen_prompt"].tolist()
    TOKENS = arrays["gen_tokens"].tolist()


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = build_engine(GOLDENS / "tiny", CONFIG, backend="eager")
    yield engine
    engine.close()


def params(max_tokens: int = 6, **options: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **options)


def finish(engine: Engine) -> dict[str, RequestOutput]:
    last: dict[str, RequestOutput] = {}
    while engine.has_unfinished:
        last |= {output.request_id: output for output in engine.step()}
    return last


def check_drained(engine: Engine) -> None:
    assert not engine.has_unfinished
    assert engine.scheduler.residency.pages.num_free == CONFIG.num_pages
    assert engine.step() == []


BAD_PROMPTS: list[tuple[Any, str]] = [
    ([], "prompt: is empty"),
    ("", "prompt: text needs a tokenizer"),
    ("text", "prompt: text needs a tokenizer"),
    ([1, 256], "token id 256 at index 1 is not in the vocabulary, which ends at 255"),
    ([-1], "token id -1 at index 0"),
    ([2**63], "token id 9223372036854775808 at index 0"),
    ([1, True], "token ids must be integers, got True at index 1"),
    ([1.0], "token ids must be integers, got 1.0"),
    (["1"], "token ids must be integers, got '1'"),
    ([None], "token ids must be integers, got None"),
    (7, "must be text or a list of token ids, got int"),
    (b"text", "must be text or a list of token ids, got bytes"),
    ([1] * 40, "has 40 tokens, but max_model_len=40"),
    ([1] * 1000, "max_model_len=40"),
]


@pytest.mark.parametrize(("prompt", "named"), BAD_PROMPTS)
def test_a_bad_prompt_is_refused_and_others_are_unharmed(engine: Engine, prompt: Any, named: str) -> None:
    engine.add_request("good", PROMPT, params())
    engine.step()
    with pytest.raises(RequestError) as refused:
        engine.add_request("bad", prompt, params())
    assert named in str(refused.value)
    assert list(finish(engine)["good"].token_ids) == TOKENS[:6]
    engine.add_request("bad", PROMPT, params())  # the refused id was never taken
    assert list(finish(engine)["bad"].token_ids) == TOKENS[:6]
    check_drained(engine)


def test_a_prompt_beyond_the_pool_is_refused_at_once() -> None:
    config = EngineConfig(max_num_batched_tokens=8, max_num_seqs=2, max_model_len=40, page_size=4, num_pages=5)
    engine = build_engine(GOLDENS / "tiny", config, backend="eager")
    with pytest.raises(RequestError, match="need 6 KV pages of 4 tokens, but the pool has 5"):
        engine.add_request("a", [1] * 20, params(2))
    engine.add_request("a", [1] * 20, params(1))
    assert finish(engine)["a"].finish_reason == "length"


def test_duplicate_and_reused_ids(engine: Engine) -> None:
    engine.add_request("a", PROMPT, params())
    with pytest.raises(RequestError, match="'a' is already in use"):
        engine.add_request("a", [1], params())
    engine.step()
    assert engine.abort("a")
    assert not engine.abort("a")
    engine.add_request("a", PROMPT, params())  # at once, although the id's first life had a step behind it
    assert list(finish(engine)["a"].token_ids) == TOKENS[:6]
    check_drained(engine)


@pytest.mark.parametrize("request_id", [1, None, b"a"])
def test_a_request_id_is_a_string(engine: Engine, request_id: Any) -> None:
    with pytest.raises(RequestError, match="request_id must be a string"):
        engine.add_request(request_id, [1], params())


def test_stop_ids_are_in_the_vocabulary(engine: Engine) -> None:
    with pytest.raises(RequestError, match=r"stop_token_ids: token id 256 .* ends at 255"):
        engine.add_request("a", [1], params(stop_token_ids=(256,)))
    check_drained(engine)


def test_numpy_integers_are_token_ids(engine: Engine) -> None:
    engine.add_request("a", [np.int64(token) for token in PROMPT], params(2))
    output = finish(engine)["a"]
    assert list(output.token_ids) == TOKENS[:2]
    assert all(type(token) is int for token in output.prompt_token_ids)


def test_ends(engine: Engine) -> None:
    engine.add_request("stop", PROMPT, params(20, stop_token_ids=(TOKENS[2],)))
    engine.add_request("length", PROMPT, params(2))
    engine.add_request("model_len", PROMPT, params(1000))
    outputs = finish(engine)
    assert list(outputs["stop"].token_ids) == TOKENS[:3]
    assert list(outputs["length"].token_ids) == TOKENS[:2]
    assert len(outputs["model_len"].token_ids) == 40 - len(PROMPT)
    assert {name: output.finish_reason for name, output in outputs.items()} == {
        "stop": "stop",
        "length": "length",
        "model_len": "length",
    }
    check_drained(engine)


def test_the_models_eos_ends_a_request_unless_ignored(monkeypatch: pytest.MonkeyPatch, engine: Engine) -> None:
    object.__setattr__(engine.model.config, "eos_token_ids", (TOKENS[1], TOKENS[3]))
    engine.add_request("eos", PROMPT, SamplingParams(max_tokens=6))
    engine.add_request("ignored", PROMPT, params(6))
    outputs = finish(engine)
    first = min(TOKENS.index(TOKENS[1]), TOKENS.index(TOKENS[3]))
    assert list(outputs["eos"].token_ids) == TOKENS[: first + 1]
    assert outputs["eos"].finish_reason == "stop"
    assert outputs["ignored"].finish_reason == "length"


def test_outputs_are_cumulative_and_timed(engine: Engine) -> None:
    engine.add_request("a", PROMPT, params(3))
    seen = []
    while engine.has_unfinished:
        seen += engine.step()
    assert [list(output.token_ids) for output in seen] == [TOKENS[:1], TOKENS[:2], TOKENS[:3]]
    assert [output.finished for output in seen] == [False, False, True]
    last = seen[-1]
    assert (last.prompt, last.prompt_token_ids, last.text, last.error) == (None, tuple(PROMPT), None, None)
    metrics = last.metrics
    assert metrics.time_to_first_token is not None
    assert metrics.latency is not None
    assert 0 < metrics.time_to_first_token < metrics.latency
    assert seen[0].metrics.latency is None


def failing_once(engine: Engine, monkeypatch: pytest.MonkeyPatch, error: BaseException, at: int) -> None:
    """Make the ``at``-th launch from now raise."""
    submit: Callable[[Any], Any] = engine.executor.submit
    launches = iter(range(1000))

    def fail(plan: Any) -> Any:
        if next(launches) == at:
            raise error
        return submit(plan)

    monkeypatch.setattr(engine.executor, "submit", fail)


@pytest.mark.parametrize("at", [0, 3, 9])
def test_a_step_that_cannot_be_launched_fails_its_requests_only(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    failing_once(engine, monkeypatch, CaptureError("span_slot: is odd"), at)
    for name in "abcde":  # three at a time, so some wait while the step fails
        engine.add_request(name, PROMPT, params())
    outputs = finish(engine)
    failed = {name for name, output in outputs.items() if output.finish_reason == "error"}
    assert failed
    assert failed < set("abcde")
    for name, output in outputs.items():
        if name in failed:
            assert output.error == f"request {name!r}: span_slot: is odd"
        else:
            assert list(output.token_ids) == TOKENS[:6]
    check_drained(engine)


def test_an_interrupt_waits_for_the_end_of_the_step(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.add_request("a", PROMPT[:1], params(1))
    for _ in range(engine.model.config.total_ut_steps - 1):
        engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(engine.executor, "poll", _interrupting(engine.executor.poll))
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    assert engine.has_unfinished  # the step was the last one, and its output is still to come
    (output,) = engine.step()
    assert output.finish_reason == "length"
    check_drained(engine)


def _interrupting(poll: Callable[..., Any]) -> Callable[..., Any]:
    def interrupted(ticket: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        return poll(ticket)

    return interrupted


def test_an_unforeseen_failure_stops_the_engine(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    failing_once(engine, monkeypatch, RuntimeError("device lost"), at=0)
    engine.add_request("a", PROMPT, params())
    with pytest.raises(RuntimeError, match="device lost"):
        engine.step()
    with pytest.raises(EngineError, match="its last step did not come to an end"):
        engine.step()
    with pytest.raises(EngineError, match="make a new one"):
        engine.add_request("b", PROMPT, params())


def test_a_plan_that_breaks_a_rule_stops_the_engine(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = engine.scheduler.plan

    def skip_a_row() -> Any:
        step = plan()
        assert step is not None
        step.tasks[0].token_start += 1
        step.span_start[0] += 1
        return step

    monkeypatch.setattr(engine.scheduler, "plan", skip_a_row)
    engine.add_request("a", PROMPT, params())
    with pytest.raises(EngineError, match="starts behind a prefix"):
        engine.step()
    with pytest.raises(EngineError, match="cannot go on"):
        engine.step()


def test_a_lost_request_is_an_error_not_a_hang(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.scheduler, "plan", lambda: None)
    engine.add_request("a", PROMPT, params())
    with pytest.raises(EngineError, match="no row is ready"):
        engine.step()


def test_a_closed_engine_says_so(engine: Engine) -> None:
    engine.add_request("a", PROMPT, params())
    engine.close()
    engine.close()
    assert not engine.abort("a")
    with pytest.raises(EngineError, match="was closed"):
        engine.step()
    with pytest.raises(EngineError, match="was closed"):
        engine.add_request("b", PROMPT, params())
