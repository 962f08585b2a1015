"""New weights in a running engine: as if it had been built from them, with nothing recorded again."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.e2e.drive import GOLDENS, build, check_drained, generate, run
from tests.e2e.harness import golden
from wavegraph.engine.engine import Engine
from wavegraph.errors import CheckpointError, ConfigError, EngineError
from wavegraph.sampling import SamplingParams

PROMPT: list[int] = golden("tiny")["token_ids"].tolist()
PARAMS = SamplingParams(max_tokens=10, ignore_eos=True, exit_threshold=0.5)


@pytest.fixture(scope="module")
def new_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint ``tiny`` with other weights."""
    folder = tmp_path_factory.mktemp("new")
    shutil.copy(GOLDENS / "tiny" / "config.json", folder)
    generator = torch.Generator().manual_seed(3)
    tensors = load_file(GOLDENS / "tiny" / "model.safetensors")
    save_file(
        {name: tensor + 0.1 * torch.randn(tensor.shape, generator=generator) for name, tensor in tensors.items()},
        folder / "model.safetensors",
    )
    return folder


@pytest.fixture
def new(new_folder: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = load_file(new_folder / "model.safetensors")
    return tensors


def tokens(engine: Engine) -> list[tuple[int, ...]]:
    sampled = SamplingParams(max_tokens=10, ignore_eos=True, temperature=1.0, seed=3)
    return [output.token_ids for output in generate(engine, [(PROMPT, PARAMS), (PROMPT[:5], sampled)])]


def addresses(engine: Engine) -> list[int]:
    return [storage.data_ptr() for storage in engine.executor._static.storages.values()]


@pytest.mark.parametrize("backend", ["recorded", pytest.param("eager", marks=pytest.mark.slow)])
def test_as_if_built_from_them(new_folder: Path, new: dict[str, Tensor], backend: str) -> None:
    engine, fresh = build(backend=backend), build(new_folder, backend=backend)
    old = tokens(engine)
    facts, before = engine.executor.core.facts, addresses(engine)
    hits = engine.stats().prefix_hits
    engine.update_weights(new)
    assert engine.stats().cached_pages == 0
    after = tokens(engine)
    assert after == tokens(fresh) != old
    assert engine.stats().prefix_hits == hits, "a page of the old weights was used"
    assert (engine.executor.core.facts, addresses(engine)) == (facts, before)
    engine.update_weights(load_file(GOLDENS / "tiny" / "model.safetensors"))
    assert tokens(engine) == old
    engine.close()
    fresh.close()


def test_live_requests_refuse_it(new: dict[str, Tensor]) -> None:
    engine = build()
    want = tokens(engine)
    engine.add_request("a", PROMPT, PARAMS)
    engine.step()
    with pytest.raises(EngineError, match="1 requests are not finished; pass live='finish' or live='abort'"):
        engine.update_weights(new)
    assert run(engine)["a"].token_ids == want[0]
    check_drained(engine)
    engine.close()


def test_live_requests_are_finished_first(new_folder: Path, new: dict[str, Tensor]) -> None:
    engine, fresh = build(max_num_seqs=2), build(new_folder)
    want = tokens(engine)
    for name in "abc":
        engine.add_request(name, PROMPT, PARAMS)
    for _ in range(9):
        engine.step()
    engine.update_weights(new, live="finish")
    assert engine.has_unfinished
    outputs = {output.request_id: output for output in engine.step()}
    assert [outputs[name].token_ids for name in "abc"] == [want[0]] * 3
    assert {output.finish_reason for output in outputs.values()} == {"length"}
    check_drained(engine)
    assert tokens(engine) == tokens(fresh)
    engine.close()
    fresh.close()


def test_live_requests_are_aborted(new_folder: Path, new: dict[str, Tensor]) -> None:
    engine, fresh = build(max_num_seqs=2), build(new_folder)
    for name in "abc":
        engine.add_request(name, PROMPT, PARAMS)
    for _ in range(9):
        engine.step()
    engine.update_weights(new, live="abort")
    check_drained(engine)
    assert engine.stats().finished == {"abort": 3}
    assert tokens(engine) == tokens(fresh)
    engine.close()
    fresh.close()


def test_wrong_weights_change_nothing(new: dict[str, Tensor]) -> None:
    engine = build()
    want = tokens(engine)
    missing = dict(list(new.items())[1:])
    shaped = new | {"model.norm.weight": torch.zeros(3)}
    for bad in (missing, shaped, new | {"model.extra": torch.zeros(1)}):
        with pytest.raises(CheckpointError):
            engine.update_weights(bad)
        assert tokens(engine) == want
    with pytest.raises(ConfigError, match="live must be 'refuse', 'finish' or 'abort', got 'later'"):
        engine.update_weights(new, live="later")  # type: ignore[arg-type]
    engine.close()


@pytest.mark.parametrize("live", ["abort", "finish"])
def test_wrong_weights_are_refused_before_any_request_is_touched(new: dict[str, Tensor], live: str) -> None:
    engine = build()
    engine.add_request("a", PROMPT, PARAMS)
    engine.step()
    steps = engine.stats().scheduler.steps
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight"):
        engine.update_weights({**new, "model.norm.weight": torch.zeros(3)}, live=live)  # type: ignore[arg-type]
    assert engine.stats().scheduler.steps == steps
    assert run(engine)["a"].finish_reason == "length"
    check_drained(engine)
    engine.close()
