"""The built-in model as a checkpoint: its files, names, shapes and tokenizer."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from tokenizers import Tokenizer

from tools.train_builtin import CONFIG
from wavegraph.builtin import builtin_path

GOLDEN = Path(__file__).parents[1] / "goldens" / "tiny" / "model.safetensors"


def shapes(file: Path) -> dict[str, tuple[int, ...]]:
    with safe_open(file, framework="np") as tensors:
        return {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118


def test_it_is_a_whole_checkpoint_of_at_most_8_mb() -> None:
    files = {path.name: path.stat().st_size for path in builtin_path().iterdir()}
    assert set(files) == {"MODEL_CARD.md", "config.json", "model.safetensors", "tokenizer.json"}
    assert files["model.safetensors"] <= 8_000_000


def test_it_is_what_the_trainer_makes() -> None:
    assert json.loads((builtin_path() / "config.json").read_text()) == CONFIG


def test_tensors_have_the_public_names_and_shapes() -> None:
    found = shapes(builtin_path() / "model.safetensors")
    public = {name for name in shapes(GOLDEN) if ".layers.1." not in name}
    layers = range(CONFIG["num_hidden_layers"])
    assert set(found) == {name.replace("layers.0.", f"layers.{layer}.") for name in public for layer in layers}
    hidden, inner, vocab = (CONFIG[key] for key in ("hidden_size", "intermediate_size", "vocab_size"))
    assert found["model.embed_tokens.weight"] == found["lm_head.weight"] == (vocab, hidden)
    assert found["model.layers.0.mlp.down_proj.weight"] == (hidden, inner)
    assert found["model.early_exit_gate.weight"] == (1, hidden)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(builtin_path() / "tokenizer.json"))


def test_tokenizer_fits_the_configuration(tokenizer: Tokenizer) -> None:
    assert tokenizer.get_vocab_size() == CONFIG["vocab_size"]
    assert tokenizer.token_to_id("<|endoftext|>") == CONFIG["eos_token_id"] == 0
    assert (tokenizer.token_to_id("<|im_start|>"), tokenizer.token_to_id("<|im_end|>")) == (1, 2)
    assert tokenizer.encode("2024").tokens == ["2", "0", "2", "4"]


@given(text=st.text())
def test_every_text_survives_the_tokenizer(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
