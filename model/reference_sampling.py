"""An independent answer to compare with: one token drawn in float64 NumPy, one row at a time.

Written from the words of `wavegraph.model.sampling` and sharing no code with it, down to its own Philox
(Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"; constants and rounds as in Random123).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """One request's sampling parameters, named as users know them. Those of no effect are the default."""

    prompt_len: int = 0
    seed: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_tokens: int = 0
    stop_token_ids: Sequence[int] = ()
    logit_bias: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Draw:
    """The token, and how near the nearest decision was to going the other way.

    ``margin`` is in units of probability or of (scaled) logits, whichever decided; rounding errors below it cannot
    have changed the token. Tokens of equal logits and equal treatment are told apart by id, which no rounding
    changes. ``kept`` are the tokens that could have been drawn, the likeliest first, of ``probability``.
    """

    token: int
    margin: float
    kept: NDArray[np.int64]
    probability: Array


def philox4x32(counter: Sequence[int], key: Sequence[int]) -> tuple[int, int, int, int]:
    """Philox4x32-10 of a counter of four and a key of two 32-bit words."""
    a, b, c, d = counter
    low, high = key
    for step in range(10):
        first, second = a * 0xD2511F53, c * 0xCD9E8D57
        round_low, round_high = low + step * 0x9E3779B9, high + step * 0xBB67AE85
        a, b, c, d = (second >> 32) ^ b ^ round_low, second, (first >> 32) ^ d ^ round_high, first
        a, b, c, d = (word % 2**32 for word in (a, b, c, d))
    return a, b, c, d


def uniform(seed: int, position: int) -> float:
    """The number in [0, 1) that decides the token of a position: a multiple of 2**-24."""
    word = philox4x32((position, 0, 0, 0), (seed % 2**32, seed // 2**32 % 2**32))[0]
    return (word >> 8) / 2**24


def processed(logits: Array, history: Sequence[int], settings: Settings) -> Array:
    """``logits [V]`` after penalties, bias and bans, for the token after ``history``."""
    out = np.array(logits, dtype=np.float64)
    generated = history[settings.prompt_len :]
    for token in set(history):
        scale = float(np.float32(settings.repetition_penalty))
        out[token] = out[token] / scale if out[token] > 0 else out[token] * scale
    for token in set(generated):
        out[token] -= float(np.float32(settings.frequency_penalty)) * generated.count(token)
        out[token] -= float(np.float32(settings.presence_penalty))
    for token, bias in settings.logit_bias.items():
        out[token] += float(np.float32(bias))
    if len(generated) < settings.min_tokens:
        out[list(settings.stop_token_ids)] = -np.inf
    return out


def draw(logits: Array, history: Sequence[int], settings: Settings) -> Draw:
    """The token that follows ``history`` (all tokens so far), from raw ``logits [V]``."""
    final = processed(logits, history, settings)
    order = np.argsort(-final, kind="stable")
    ranked = final[order]
    same = _alike(logits, final, history, settings)[order]
    with np.errstate(invalid="ignore"):
        gaps = np.append(ranked[:-1] - ranked[1:], np.inf)
    gaps[:-1][same[1:] == same[:-1]] = np.inf
    gaps[np.isnan(gaps)] = np.inf  # between two bans there is nothing to decide
    if settings.temperature == 0:
        return Draw(int(order[0]), float(gaps[0]), order[:1], np.ones(1))

    temperature = float(np.float32(settings.temperature))
    chance = np.exp((ranked - ranked[0]) / temperature)
    count, margin = _cut(chance, settings, gaps / temperature)
    chance = chance[:count] / chance[:count].sum()
    ends = np.cumsum(chance)
    u = uniform(settings.seed, len(history))
    at = min(int(np.searchsorted(ends, u, side="right")), count - 1)
    edges = [ends[at] - u] if at + 1 < count else []
    edges += [u - ends[at - 1]] if at else []
    neighbours = gaps[max(0, at - 1) : at + 1] if at + 1 < count else gaps[max(0, at - 1) : at]
    margin = min([margin, *edges, *(neighbours / temperature)])
    return Draw(int(order[at]), float(margin), order[:count], chance)


def _cut(chance: Array, settings: Settings, gaps: Array) -> tuple[int, float]:
    """How many of the sorted tokens top-k, top-p and min-p keep, and the margin of that."""
    count, margin = len(chance), np.inf
    if 0 < settings.top_k < count:
        count = settings.top_k
        margin = gaps[count - 1]
    if settings.top_p < 1:
        share = chance[:count] / chance[:count].sum()
        before = np.cumsum(share) - share
        slack = float(np.float32(settings.top_p)) - before
        count, margin = _keep(slack, slack > 0, margin)
    if settings.min_p > 0:
        slack = chance[:count] - float(np.float32(settings.min_p))
        count, margin = _keep(slack, slack >= 0, margin)
    return count, margin


def _keep(slack: Array, kept: NDArray[np.bool_], margin: float) -> tuple[int, float]:
    """Keep the first of the tokens; the nearest decision is that on the last kept or the first dropped one."""
    count = max(1, int(kept.sum()))
    decided = np.abs(slack[max(1, count - 1) : count + 1])
    return count, min([margin, *decided])


def _alike(logits: Array, final: Array, history: Sequence[int], settings: Settings) -> NDArray[np.int64]:
    """A number per token ``[V]``: equal for those whose logits stayed what they were, or were treated equally."""
    generated = history[settings.prompt_len :]
    numbers: dict[tuple[float | bool, ...], int] = {}

    def number(token: int) -> int:
        treatment: tuple[float | bool, ...] = (float(logits[token]),)
        if final[token] != logits[token]:
            banned = token in settings.stop_token_ids
            treatment += token in history, generated.count(token), settings.logit_bias.get(token, 0.0), banned
        return numbers.setdefault(treatment, len(numbers))

    return np.array([number(token) for token in range(len(logits))])
