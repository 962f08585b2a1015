import gc
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.drive import COST
from wavegraph import LLM, EngineConfig, SamplingParams
from wavegraph.buckets.cost import CostModel
from wavegraph.builtin import builtin_path
from wavegraph.errors import CaptureError, CheckpointError, ConfigError, EngineError, RequestError

GOLDENS = Path(__file__).parents[1] / "goldens"
CONFIG = EngineConfig(
    prefill_chunk_size=4, max_num_batched_tokens=16, max_num_seqs=4, max_model_len=64, num_pages=16, check=True
)
PARAMS = SamplingParams(max_tokens=5, ignore_eos=True)
WAVES = "Waves follow each other."


@pytest.fixture(scope="module")
def shared_llm() -> Iterator[LLM]:
    with LLM(builtin_path(), CONFIG) as llm:
        yield llm


@pytest.fixture
def llm(shared_llm: LLM) -> Iterator[LLM]:
    """One LLM for all tests; each must leave it empty."""
    yield shared_llm
    gc.collect()
    assert not shared_llm.engine.has_unfinished
    assert shared_llm.engine.scheduler.residency.pages.num_free == CONFIG.num_pages


def test_prompts_come_back_in_order_and_alone_as_together(llm: LLM) -> None:
    prompts: list[str | list[int]] = [WAVES, [5, 6, 7], "a", WAVES * 2]
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (9, 1, 4, 2)]
    together = llm.generate(prompts, params)
    assert [output.prompt for output in together] == [WAVES, None, "a", WAVES * 2]
    assert [len(output.token_ids) for output in together] == [9, 1, 4, 2]
    assert together[1].prompt_token_ids == (5, 6, 7)
    for prompt, each, output in zip(prompts, params, together, strict=True):
        (alone,) = llm.generate(prompt, each)
        assert (alone.token_ids, alone.text) == (output.token_ids, output.text)
        assert llm.engine.tokenizer is not None
        assert output.text == llm.engine.tokenizer.decode(output.token_ids)


def test_wavefront_off_gives_the_same_tokens(llm: LLM) -> None:
    config = EngineConfig(wavefront=False, max_num_batched_tokens=16, max_num_seqs=2, max_model_len=64, num_pages=8)
    with LLM(builtin_path(), config, backend="eager") as ordinary:
        off = ordinary.generate([WAVES, "a"], PARAMS)
    assert [output.token_ids for output in off] == [o.token_ids for o in llm.generate([WAVES, "a"], PARAMS)]


def test_a_target_needs_a_measured_cost_model_before_any_weight_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes as an object, or as a file that holds one."""
    file = tmp_path / "cost.json"
    file.write_text(json.dumps(COST.to_dict()))
    config = replace(CONFIG, target_itl_ms=20.0)
    for cost in (COST, file, str(file)):
        with LLM(builtin_path(), config, backend="eager", cost=cost) as llm:
            assert llm.engine.scheduler.cost == COST
            assert len(llm.generate([WAVES, [1]], PARAMS)) == 2
    monkeypatch.setattr("wavegraph.startup.build.load_model", None)
    for unmeasured in (None, CostModel.assumed(16)):
        with pytest.raises(ConfigError, match="target_itl_ms: needs measured costs"):
            LLM(builtin_path(), config, cost=unmeasured)
    for broken in (tmp_path / "none.json", builtin_path() / "config.json"):
        with pytest.raises(ConfigError, match="cost model: "):
            LLM(builtin_path(), config, cost=broken)


def test_progress_counts_finished_requests(llm: LLM) -> None:
    seen: list[tuple[int, int]] = []
    llm.generate([[1], [2], [3]], PARAMS, on_progress=lambda done, total: seen.append((done, total)))
    assert seen == [(1, 3), (2, 3), (3, 3)]


@pytest.mark.parametrize(
    ("prompts", "named"),
    [
        ([], "prompts: is empty"),
        ("", r"prompts\[0\]: prompt: is empty"),
        (["good", ""], r"prompts\[1\]: prompt: is empty"),
        (["good", []], r"prompts\[1\]: prompt: is empty"),
        ([[1], [1, 1024]], r"prompts\[1\]: prompt: token id 1024 at index 1"),
        (["good", "bad" * 99], r"prompts\[1\]: .* max_model_len=64"),
        (["good", 7], r"prompts\[1\]: prompt: must be text or a list of token ids, got int"),
        ([1, "two"], r"prompts\[0\]: prompt: token ids must be integers, got 'two' at index 1"),
        (["good", "\ud800"], r"prompts\[1\]: prompt: not valid Unicode"),
        (7, "prompts: must be text, token ids, or a list of either, got int"),
        (None, "got NoneType"),
    ],
)
def test_one_bad_prompt_and_nothing_is_run(llm: LLM, prompts: Any, named: str) -> None:
    steps = llm.engine.stats().scheduler.steps
    with pytest.raises(RequestError, match=named):
        llm.generate(prompts, PARAMS)
    assert llm.engine.stats().scheduler.steps == steps
    assert not llm.engine.has_unfinished


def test_params_are_one_or_one_each(llm: LLM) -> None:
    with pytest.raises(RequestError, match="params: got 1 for 2 prompts"):
        llm.generate(["a", "b"], [PARAMS])


@pytest.mark.parametrize("params", [{"max_tokens": 1}, 5, ["x"], "x"])
def test_params_of_another_type_are_refused(llm: LLM, params: Any) -> None:
    with pytest.raises(RequestError, match=r"params:? must be SamplingParams"):
        llm.generate(["a"], params)
    with pytest.raises(RequestError, match="params: must be SamplingParams"):
        llm.stream("a", params)
    with pytest.raises(RequestError, match="params must be SamplingParams"):
        llm.engine.add_request("name", "a", params)


def test_a_stream_grows_to_what_generate_gives(llm: LLM) -> None:
    (whole,) = llm.generate(WAVES, PARAMS)
    outputs = list(llm.stream(WAVES, PARAMS))
    assert [output.token_ids for output in outputs] == [whole.token_ids[: n + 1] for n in range(5)]
    assert outputs[-1].text == whole.text
    assert [output.finish_reason for output in outputs] == [None] * 4 + ["length"]


def test_streams_and_generate_can_be_mixed(llm: LLM) -> None:
    (first,), (second,) = llm.generate([1, 2], PARAMS), llm.generate([3], PARAMS)
    one, two = llm.stream([1, 2], PARAMS), llm.stream([3], PARAMS)
    last_one, last_two = next(one), next(two)
    (other,) = llm.generate(WAVES, PARAMS)
    assert other.finished
    for output in one:
        last_one = output
    for output in two:
        last_two = output
    assert (last_one.token_ids, last_two.token_ids) == (first.token_ids, second.token_ids)


def test_leaving_a_stream_ends_its_request(llm: LLM) -> None:
    for output in llm.stream(WAVES, PARAMS):
        assert not output.finished
        break
    gc.collect()
    assert not llm.engine.has_unfinished
    with llm.stream(WAVES, PARAMS) as stream:
        next(stream)
    assert not llm.engine.has_unfinished
    assert list(stream) == []
    never_started = llm.stream(WAVES, PARAMS)
    assert llm.engine.has_unfinished
    del never_started
    gc.collect()
    assert not llm.engine.has_unfinished


def test_a_stream_refuses_a_bad_prompt_at_once(llm: LLM) -> None:
    with pytest.raises(RequestError, match="is empty"):
        llm.stream("")


def test_a_failed_step_is_said_in_its_outputs_and_the_engine_goes_on(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(plan: Any) -> Any:
        raise CaptureError("bucket 16 was not recorded")

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.executor, "submit", refuse)
        for output in llm.generate(["a", "b"], PARAMS):
            assert output.finish_reason == "error"
            assert output.error == f"request {output.request_id!r}: bucket 16 was not recorded"
        (last,) = llm.stream("a", PARAMS)
        assert "bucket 16" in (last.error or "")
    assert llm.generate("a", PARAMS)[0].finished


def test_a_request_aborted_on_the_engine_is_an_error_not_a_hang(llm: LLM) -> None:
    stream = llm.stream(WAVES, PARAMS)
    llm.engine.abort(stream.request_id)
    with pytest.raises(EngineError, match="is gone"):
        next(stream)


def test_text_needs_a_tokenizer_but_ids_do_not() -> None:
    with LLM(GOLDENS / "tiny_sharded", CONFIG, backend="eager") as llm:
        with pytest.raises(RequestError, match="the checkpoint has none; give a list of token ids"):
            llm.generate("text")
        (output,) = llm.generate([1, 2, 3], PARAMS)
    assert (output.text, len(output.token_ids)) == (None, 5)


def test_a_closed_llm_says_so() -> None:
    llm = LLM(GOLDENS / "tiny", CONFIG, backend="eager")
    stream = llm.stream([1], PARAMS)
    llm.close()
    llm.close()
    with pytest.raises(EngineError, match="was closed"):
        next(stream)
    with pytest.raises(EngineError, match="was closed"):
        llm.generate([1])


@pytest.mark.parametrize(
    ("arguments", "error", "named"),
    [
        ({"path": GOLDENS / "none"}, CheckpointError, "no such folder"),
        ({"path": GOLDENS / "tiny", "dtype": "int8"}, ConfigError, "dtype"),
        ({"path": GOLDENS / "tiny", "backend": "fast"}, ConfigError, "backend: 'fast' is unknown"),
        ({"path": GOLDENS / "tiny", "config": EngineConfig(max_model_len=70000)}, ConfigError, "70000"),
        ({"path": GOLDENS / "tiny", "config": {}}, ConfigError, "config must be an EngineConfig, got dict"),
        ({"path": GOLDENS / "tiny", "config": EngineConfig(num_pages=10**9)}, ConfigError, "lower num_pages"),
    ],
)
def test_what_cannot_be_built_is_named(arguments: dict[str, Any], error: type[Exception], named: str) -> None:
    with pytest.raises(error, match=named):
        LLM(**arguments)


def test_sizes_are_refused_before_the_weights_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wavegraph.startup.build.load_model", lambda *_, **__: pytest.fail("the weights were read"))
    with pytest.raises(ConfigError, match="the tables of requests"):
        LLM(GOLDENS / "tiny", EngineConfig(max_num_seqs=10**9))


@pytest.mark.parametrize(
    ("error", "expected", "named"),
    [
        (MemoryError(), ConfigError, "does not fit into memory .* lower kv_cache_bytes"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: 9"), ConfigError, "can't allocate memory: 9"),
        (RuntimeError("something else"), RuntimeError, "something else"),
    ],
)
def test_memory_that_is_not_given_is_a_matter_of_options(
    monkeypatch: pytest.MonkeyPatch, error: Exception, expected: type[Exception], named: str
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr("wavegraph.startup.build.Engine", fail)
    with pytest.raises(expected, match=named):
        LLM(GOLDENS / "tiny", CONFIG)


def test_public_names_can_all_be_imported() -> None:
    import wavegraph

    for name in wavegraph.__all__:
        assert getattr(wavegraph, name) is not None
    assert set(wavegraph.__all__) <= set(dir(wavegraph))
    with pytest.raises(AttributeError, match="no attribute 'LLMS'"):
        wavegraph.LLMS  # noqa: B018
