"""The training of the built-in model: corpus, losses, and runs that stop and go on."""

import dataclasses
import io
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from rich.console import Console
from safetensors.torch import load_file

from tools import train_builtin
from tools.corpus import Corpus, Document, docstrings, read_modules
from tools.evaluation import exits_at
from tools.looped import LoopedModel, adaptive_loss, exit_distribution, expected_loss
from tools.training import Recipe, Training, windows_of
from wavegraph.errors import CheckpointError
from wavegraph.model.config import OuroConfig
from wavegraph.model.reference import ReferenceModel, exit_steps

CONFIG = train_builtin.CONFIG | {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "total_ut_steps": 3,
}
SIZES = OuroConfig.from_dict(CONFIG)
RECIPE = Recipe(steps=6, gate_steps=4, batch=2, window=16, rate=1e-2, gate_rate=1e-2, beta=0.1, seed=7)
TEXT = "def wave(rows):\n    return [row for row in rows if row]\n"
CORPUS = Corpus(
    train=tuple(Document(f"{name}.py", f"# {name}\n{TEXT * 9}") for name in ("one", "two", "three")),
    held_out=(Document("four.py", f"# four\n{TEXT * 3}"),),
)
QUIET = Console(file=io.StringIO())


def looped_model() -> LoopedModel:
    model = LoopedModel(SIZES, torch.float32)
    model.initialise(1)
    with torch.no_grad():  # beyond their small first values, so that every weight shows in the result
        for weight in (model.lm_head.weight, model.model.early_exit_gate.weight, model.model.early_exit_gate.bias):
            weight.normal_(generator=torch.Generator().manual_seed(2))
    return model


def test_the_module_computes_what_the_reference_does() -> None:
    model = looped_model()
    tokens = torch.randint(300, (2, 41), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        loss, gate = model.score(tokens)
    reference = ReferenceModel(CONFIG, {name: tensor.numpy() for name, tensor in model.state_dict().items()})
    for row, ids in enumerate(tokens.tolist()):
        wanted = reference.forward(ids[:-1])
        total = np.log(np.exp(wanted.logits).sum(-1))
        losses = total - wanted.logits[:, np.arange(40), ids[1:]]
        assert np.abs(loss[:, row].numpy() - losses).max() < 1e-4
        assert np.abs(exit_distribution(gate)[:, row].numpy() - wanted.pdf).max() < 1e-5
        assert exits_at(gate[:, row], 0.5).tolist() == exit_steps(wanted.cdf, 0.5).tolist()


def test_the_expected_loss_weighs_depths_and_rewards_entropy() -> None:
    loss = torch.tensor([[3.0], [2.0], [1.0]])
    gate = torch.tensor([[0.0], [0.0], [9.0]])  # leave with 1/2, then 1/2; the last value does not count
    entropy = 0.5 * math.log(2) + 0.5 * math.log(4)
    assert expected_loss(loss, gate, 0.1).item() == pytest.approx(1.5 + 0.5 + 0.25 - 0.1 * entropy, rel=1e-6)


def test_the_adaptive_loss_wants_to_go_on_where_the_last_loop_gained() -> None:
    loss = torch.tensor([[3.0, 3.0], [2.0, 3.0], [2.0, 4.0]])
    best = torch.sigmoid(torch.tensor(50 * -0.005))  # no gain: not quite one half
    go_on = torch.tensor([[1.0, best], [best, best]])
    gate = torch.logit(1 - go_on, eps=1e-6)
    wanted = torch.nn.functional.binary_cross_entropy(go_on, go_on, reduction="sum") / 2 / 3
    assert adaptive_loss(loss, torch.cat([torch.full((1, 2), 5.0), gate])).item() == pytest.approx(
        wanted.item(), rel=1e-3
    )
    assert adaptive_loss(loss, torch.cat([gate[:1], gate + 0.5])).item() > wanted.item()


def test_an_epoch_takes_every_piece_once_and_the_next_cuts_anew() -> None:
    tokens = torch.arange(16 * 10 + 3)  # 10 whole pieces, less one to have room for the phase
    epochs = [torch.cat([windows_of(tokens, RECIPE, epoch * 4 + step) for step in range(4)]) for epoch in range(2)]
    for windows in epochs:
        assert windows.shape == (8, 17)
        assert torch.equal(windows, windows[:, :1] + torch.arange(17))
        assert len(set(windows[:, 0].tolist())) == 8
        assert len(set((windows[:, 0] % 16).tolist())) == 1
    assert not torch.equal(*epochs)
    assert len({int(windows[0, 0]) % 16 for windows in epochs}) == 2


def test_the_second_stage_trains_the_gate_alone() -> None:
    training = Training(SIZES, RECIPE, torch.arange(300).repeat(4), torch.float32)
    before = {}
    while not training.done:
        if training.step == RECIPE.steps:
            before = {name: tensor.clone() for name, tensor in training.model.state_dict().items()}
        training.advance()
    changed = {name for name, tensor in training.model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed == {"model.early_exit_gate.weight", "model.early_exit_gate.bias"}


class Stop(Exception):
    """What ends a run in the middle."""


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole")
    train_builtin.train(out, CORPUS, CONFIG, RECIPE, QUIET)
    return out


@pytest.mark.parametrize("stops", [(3,), (6,), (9,), (1, 7)])  # in stage I, between, in stage II, twice
def test_an_interrupted_run_makes_the_same_bits(
    whole_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stops: tuple[int, ...]
) -> None:
    monkeypatch.setattr(train_builtin, "SAVE_EVERY", 2)
    advance = Training.advance
    for stop in stops:

        def until(training: Training, stop: int = stop) -> None:
            if training.step == stop:
                raise Stop
            advance(training)

        monkeypatch.setattr(Training, "advance", until)
        with pytest.raises(Stop):
            train_builtin.train(tmp_path, CORPUS, CONFIG, RECIPE, QUIET)
    monkeypatch.setattr(Training, "advance", advance)
    train_builtin.train(tmp_path, CORPUS, CONFIG, RECIPE, QUIET)
    for file in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (tmp_path / file).read_bytes() == (whole_run / file).read_bytes()
    one, other = (torch.load(out / "checkpoint.pt", weights_only=True) for out in (tmp_path, whole_run))
    assert all(torch.equal(one["model"][name], tensor) for name, tensor in other["model"].items())


def test_a_run_leaves_a_checkpoint_and_a_card(whole_run: Path) -> None:
    assert json.loads((whole_run / "config.json").read_text()) == CONFIG
    assert all(tensor.dtype == torch.bfloat16 for tensor in load_file(whole_run / "model.safetensors").values())
    card = (whole_run / "MODEL_CARD.md").read_text()
    assert "4 steps of the same size" in card
    assert "| 0.9 |" in card
    assert "`four.py`" in card


@pytest.mark.parametrize(
    ("corpus", "recipe", "named"),
    [
        (CORPUS, dataclasses.replace(RECIPE, rate=1e-3), "was begun with rate 0.01, and now it is 0.001"),
        (Corpus(CORPUS.train, ()), RECIPE, "was begun with corpus"),
    ],
)
def test_a_run_of_something_else_is_not_gone_on_with(
    whole_run: Path, corpus: Corpus, recipe: Recipe, named: str
) -> None:
    with pytest.raises(CheckpointError, match=named):
        train_builtin.train(whole_run, corpus, CONFIG, recipe, QUIET)


def test_the_command_names_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = CliRunner().invoke(train_builtin.main, ["--out", str(tmp_path / "file" / "model")])
    assert result.exit_code == 1
    assert "Not a directory" in result.output


def test_docstrings_are_the_longer_ones_unindented() -> None:
    first, second = ("a long line " * 8).strip(), ("another line " * 8).strip()
    source = f'"""{first}\n\n    Indented.\n"""\nclass A:\n    """Short."""\n    def b(self):\n        """{second}"""\n'
    assert docstrings(source) == f"{first}\n\nIndented.\n\n{second}\n"


def test_modules_are_those_of_the_standard_library_alone(tmp_path: Path) -> None:
    names = ("json/decoder.py", "json/tests/deep.py", "test/support.py", "site-packages/json.py", "mine.py", "abc.py")
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"# {name}\n")
    assert [name for name, _ in read_modules(tmp_path)] == ["abc.py", "json/decoder.py"]
