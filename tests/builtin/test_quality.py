"""What the built-in model is worth, judged on held-out text by the float64 reference."""

import json
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from tokenizers import Tokenizer

from tools.corpus import is_held_out
from tools.evaluation import THRESHOLDS, unigram_losses
from wavegraph.builtin import builtin_path
from wavegraph.model.reference import ReferenceModel, exit_steps

HELD_OUT = Path(__file__).parent / "held_out"
MODULES = {"sched.py": "sched.txt", "secrets.py": "secrets.txt", "email/_encoded_words.py": "_encoded_words.txt"}
WINDOW = 384


@pytest.fixture(scope="module")
def tokens() -> NDArray[np.int64]:
    """Whole windows of the held-out text, ``[n, WINDOW]``."""
    tokenizer = Tokenizer.from_file(str(builtin_path() / "tokenizer.json"))
    text = "".join((HELD_OUT / file).read_text(encoding="utf-8") for file in MODULES.values())
    ids = np.array(tokenizer.encode(text).ids)
    return ids[: len(ids) // WINDOW * WINDOW].reshape(-1, WINDOW)


@pytest.fixture(scope="module")
def scored(tokens: NDArray[np.int64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Loss of each next token after each loop, and the exit's cumulative distribution there, both ``[S, N]``."""
    model = ReferenceModel.from_folder(builtin_path())
    losses, cdfs = [], []
    for window in tokens:
        forward = model.forward(window.tolist())
        logits = forward.logits[:, :-1]
        highest = logits.max(axis=-1)
        total = highest + np.log(np.exp(logits - highest[..., None]).sum(axis=-1))
        losses.append(total - logits[:, np.arange(WINDOW - 1), window[1:]])
        cdfs.append(forward.cdf[:, :-1])
    return np.concatenate(losses, axis=1), np.concatenate(cdfs, axis=1)


def test_the_text_is_held_out() -> None:
    assert all(is_held_out(name) for name in MODULES)


def test_loss_is_at_most_60_percent_of_a_unigram_models(
    tokens: NDArray[np.int64], scored: tuple[NDArray[np.float64], NDArray[np.float64]]
) -> None:
    counts = np.array(json.loads((HELD_OUT / "token_counts.json").read_text()))
    unigram = unigram_losses(np.repeat(np.arange(len(counts)), counts), tokens[:, 1:].flatten(), len(counts))
    assert scored[0][-1].mean() <= 0.6 * unigram.mean()


def test_depth_helps(scored: tuple[NDArray[np.float64], NDArray[np.float64]]) -> None:
    losses = scored[0].mean(axis=1)
    assert losses[-1] < losses[0]


def test_the_gate_lets_tokens_leave_at_three_depths_or_more(
    scored: tuple[NDArray[np.float64], NDArray[np.float64]],
) -> None:
    losses, cdf = scored
    counts = [np.bincount(exit_steps(cdf, threshold), minlength=len(losses)) for threshold in THRESHOLDS]
    assert max(np.sum(count >= 0.01 * losses.shape[1]) for count in counts) >= 3
