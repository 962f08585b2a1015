"""What a trained model is worth on held-out text, and the card that says so."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tools.looped import LoopedModel, exit_distribution

THRESHOLDS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)

_BATCH = 8


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Losses in nats a token, over the same ``tokens`` held-out tokens.

    ``unigram`` is the loss of a model that knows only how often each token occurs in the training text;
    ``by_depth [S]`` that of leaving after each loop. For each of `THRESHOLDS`: ``spread [S]``, the share of tokens that
    leave after each loop, and ``at_threshold``, the loss of leaving there.
    """

    tokens: int
    unigram: float
    by_depth: tuple[float, ...]
    spread: tuple[tuple[float, ...], ...]
    at_threshold: tuple[float, ...]


def unigram_losses(train: NDArray[np.int64], targets: NDArray[np.int64], vocab_size: int) -> NDArray[np.float64]:
    """Loss of each target under the token frequencies of ``train``, each count raised by one."""
    counts = np.bincount(train, minlength=vocab_size) + 1
    losses: NDArray[np.float64] = -np.log(counts / counts.sum())[targets]
    return losses


def evaluate(
    model: LoopedModel, train: NDArray[np.int64], held_out: NDArray[np.int64], window: int, vocab_size: int
) -> Evaluation:
    """Judge ``model`` on ``held_out [N]``, cut into windows that share no target; a short rest is left out."""
    pieces = (len(held_out) - 1) // window
    starts = torch.arange(pieces)[:, None] * window
    windows = torch.from_numpy(held_out)[starts + torch.arange(window + 1)]
    with torch.no_grad():
        scored = [model.score(batch) for batch in torch.split(windows, _BATCH)]
    loss = torch.cat([each.flatten(1) for each, _ in scored], dim=1).double()
    gate = torch.cat([each.flatten(1) for _, each in scored], dim=1)
    exits = [exits_at(gate, threshold) for threshold in THRESHOLDS]
    return Evaluation(
        tokens=loss.shape[1],
        unigram=float(unigram_losses(train, windows[:, 1:].flatten().numpy(), vocab_size).mean()),
        by_depth=tuple(loss.mean(1).tolist()),
        spread=tuple(tuple((torch.bincount(e, minlength=len(loss)) / len(e)).tolist()) for e in exits),
        at_threshold=tuple(float(loss.gather(0, e[None]).mean()) for e in exits),
    )


def exits_at(gate_logits: Tensor, threshold: float) -> Tensor:
    """``gate_logits [S, N]`` -> zero-based loop after which each token leaves ``[N]``."""
    reached = exit_distribution(gate_logits).cumsum(0) >= threshold
    reached[-1] = True
    return reached.int().argmax(0)
