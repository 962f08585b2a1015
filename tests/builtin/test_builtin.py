"""The built-in model: content, the same bits everywhere, and a cache that is never half written."""

import json
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from wavegraph.builtin import PackagedModel, builtin_path, write_model
from wavegraph.builtin.weights import WEIGHTS_SHA256, digest, make_weights
from wavegraph.errors import OutputError

FILES = {"config.json", "model.safetensors", "tokenizer.json"}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "not" / "there" / "yet"
    monkeypatch.setenv("WAVEGRAPH_CACHE", str(folder))
    return folder


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_folder_holds_a_checkpoint_and_nothing_is_left_beside_it(cache: Path) -> None:
    folder = builtin_path()
    assert names(folder) == FILES
    assert names(cache) == {folder.name}


def test_tensors_have_the_public_names_and_shapes(cache: Path) -> None:
    folder = builtin_path()
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {np.dtype("float32")}
    golden = Path(__file__).parents[1] / "goldens" / "tiny" / "model.safetensors"
    # `tiny` has layers 0 and 1; all four layers here look like its layer 0.
    public = {name for name in load_file(golden) if ".layers.1." not in name}
    layers = range(config["num_hidden_layers"])
    expected = {name.replace("layers.0.", f"layers.{layer}.") for name in public for layer in layers}
    assert set(tensors) == expected
    assert tensors["model.embed_tokens.weight"].shape == (config["vocab_size"], config["hidden_size"])
    assert tensors["lm_head.weight"].shape == (config["vocab_size"], config["hidden_size"])
    assert tensors["model.layers.0.mlp.down_proj.weight"].shape == (128, 352)
    assert tensors["model.early_exit_gate.weight"].shape == (1, 128)


def test_weights_are_the_pinned_bits() -> None:
    weights = make_weights(PackagedModel.load().config)
    assert digest(weights) == WEIGHTS_SHA256
    embedding = weights["model.embed_tokens.weight"]
    assert embedding.std() == pytest.approx(1.0, rel=0.01)
    assert embedding.mean() == pytest.approx(0.0, abs=0.01)


def test_second_call_reads_what_the_first_wrote(cache: Path) -> None:
    file = builtin_path() / "model.safetensors"
    before = file.stat()
    assert builtin_path() == file.parent
    assert (file.stat().st_ino, file.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_other_content_is_kept_under_another_name(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = PackagedModel.load()
    assert model.key != PackagedModel(model.config, model.tokenizer + b" ").key
    assert model.key != PackagedModel(model.config + b" ", model.tokenizer).key
    first = builtin_path()
    monkeypatch.setattr("wavegraph.builtin.WEIGHTS_SHA256", "0" * 64)
    assert builtin_path() != first


def test_a_writer_that_fails_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Path) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("wavegraph.builtin._flush", fail)
        with pytest.raises(OutputError, match=r"No space left on device.*WAVEGRAPH_CACHE"):
            builtin_path()
    assert names(cache) == set()
    assert names(builtin_path()) == FILES


def test_the_folder_appears_only_when_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    folder = tmp_path / "model"
    monkeypatch.setattr("wavegraph.builtin._flush", lambda _: seen.append(folder.exists()))
    write_model(PackagedModel.load(), folder)
    assert seen == [False] * 3
    assert names(folder) == FILES


def test_many_processes_may_make_it_at_once(cache: Path) -> None:
    script = "from wavegraph.builtin import *; print('ready', flush=True); input(); print(builtin_path())"
    workers = [subprocess.Popen([sys.executable, "-c", script], stdin=PIPE, stdout=PIPE, text=True) for _ in range(4)]
    for worker in workers:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "ready\n"
    for worker in workers:
        assert worker.stdin is not None
        worker.stdin.write("go\n")
        worker.stdin.flush()
    paths = {worker.communicate(timeout=60)[0] for worker in workers}
    assert [worker.returncode for worker in workers] == [0] * 4
    assert paths == {f"{builtin_path()}\n"}
    assert names(cache) == {builtin_path().name}
    assert digest(load_file(builtin_path() / "model.safetensors")) == WEIGHTS_SHA256


def test_unwritable_cache_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("WAVEGRAPH_CACHE", str(blocked / "cache"))
    with pytest.raises(OutputError, match=r"file/cache.*set WAVEGRAPH_CACHE to a folder that can be written"):
        builtin_path()


def test_read_only_cache_that_holds_the_model_is_enough(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = builtin_path()

    def read_only(*_: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Path, "mkdir", read_only)
    assert builtin_path() == folder


def test_no_home_folder_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("WAVEGRAPH_CACHE", raising=False)
    monkeypatch.setattr("wavegraph.builtin.Path.home", no_home)
    with pytest.raises(OutputError, match="WAVEGRAPH_CACHE"):
        builtin_path()


def tokenizer() -> Tokenizer:
    return Tokenizer.from_str(PackagedModel.load().tokenizer.decode())


def test_tokenizer_fits_the_configuration() -> None:
    config = json.loads(PackagedModel.load().config)
    assert tokenizer().get_vocab_size() == config["vocab_size"]
    assert tokenizer().token_to_id("<|endoftext|>") == config["eos_token_id"] == 0
    assert tokenizer().token_to_id("<|im_end|>") == 2
    assert tokenizer().encode("2024").tokens == ["2", "0", "2", "4"]


@given(st.text())
def test_every_text_survives_the_tokenizer(text: str) -> None:
    ids = tokenizer().encode(text).ids
    assert tokenizer().decode(ids, skip_special_tokens=False) == text
