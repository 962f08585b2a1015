"""The command that makes the built-in model from nothing."""

import json
from pathlib import Path

from click.testing import CliRunner
from tokenizers import Tokenizer

from wavegraph.builtin import PackagedModel, builtin_path
from wavegraph.tools.make_builtin import main


def test_two_runs_make_the_same_bytes(tmp_path: Path) -> None:
    for name in ("one", "two"):
        result = CliRunner().invoke(main, ["--out", str(tmp_path / name)], catch_exceptions=False)
        assert result.exit_code == 0, result.output
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    # The tokenizer's text comes with Python, so another Python may learn other merges; the rest is fixed.
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "one" / name).read_bytes() == (builtin_path() / name).read_bytes()
    made = Tokenizer.from_file(str(tmp_path / "one" / "tokenizer.json"))
    assert made.get_vocab_size() == PackagedModel.load().vocab_size
    packaged = json.loads(PackagedModel.load().tokenizer)
    assert json.loads(made.to_str())["added_tokens"] == packaged["added_tokens"]


def test_a_folder_that_is_there_is_left_alone(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["--out", str(tmp_path)])
    assert result.exit_code == 2
    assert "exists already: name a new folder" in result.output
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = CliRunner().invoke(main, ["--out", str(tmp_path / "file" / "model")])
    assert result.exit_code == 2
    assert "cannot be written (Not a directory): name a folder that can be" in result.output
