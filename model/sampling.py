"""A request's parameters as CODA reads them: one row of int32, floats as their bits. No torch here.

How a row of CODA draws its token, from raw logits in float32 (`Ops.draw`):

1. repetition penalty over prompt and output (a logit is divided by it if positive, else multiplied), then frequency
   (times the count) and presence penalties over the output, as vLLM defines them; the history is
   ``token_table[slot, 0..coda_pos]``, of which positions from ``PROMPT_LEN`` on are output
2. logit bias
3. stop ids are banned while the request has fewer than ``MIN_TOKENS`` outputs (``coda_pos + 1 - PROMPT_LEN``)
4. temperature; 0 takes the largest logit, the lowest id on ties, and skips the rest
5. top-k, then top-p over what top-k left, then min-p relative to the most likely token
6. one draw by inverse CDF over the tokens kept, from the most likely to the least, ties by id. Its uniform number is
   the upper 24 bits of the first word of Philox4x32-10 (Salmon et al. 2011, Random123) with the request's seed as
   key and ``(coda_pos + 1, 0, 0, 0)`` as counter: the position of the token drawn. So it depends on seed and position
   alone, never on batch, bucket, chunk or backend.
"""

import math
import struct
from collections.abc import Mapping, Sequence
from enum import IntEnum

from wavegraph.errors import RequestError

MAX_STOP_IDS = 16
MAX_LOGIT_BIAS = 64
MAX_TOP_LOGPROBS = 20
"""Tokens in ``StepIO.top_ids``, unless the vocabulary is smaller."""

FEATURE_SAMPLER = 1
"""Bit of a step's ``coda_features``: some row needs more than the greedy program, parameters or log-probabilities."""

NEVER = math.inf
"""An exit threshold that no gate reaches."""


class Action(IntEnum):
    """What CODA does for one row, in ``StepIO.coda_action``.

    ``SAMPLE`` draws the next token. ``GATE`` draws it only if the gate lets the row leave at its depth. ``SCORE``
    reports the log-probability of the token that is already known to follow. ``REPLAY`` draws nothing: it only
    repeats the KV copy of an exit taken before.
    """

    SAMPLE = 0
    GATE = 1
    SCORE = 2
    REPLAY = 3


class Column(IntEnum):
    """Where each parameter lies in a row. ``STOP_IDS``, ``BIAS_IDS`` and ``BIAS_VALUES`` are the first of many."""

    SEED_LOW = 0
    SEED_HIGH = 1
    PROMPT_LEN = 2
    MIN_TOKENS = 3
    TOP_K = 4
    TOP_LOGPROBS = 5
    STOP_COUNT = 6
    BIAS_COUNT = 7
    EXIT_COPY = 8
    # From here on to STOP_IDS: float32.
    TEMPERATURE = 9
    TOP_P = 10
    MIN_P = 11
    REPETITION = 12
    PRESENCE = 13
    FREQUENCY = 14
    EXIT_THRESHOLD = 15
    STOP_IDS = 16
    BIAS_IDS = 16 + MAX_STOP_IDS
    BIAS_VALUES = 16 + MAX_STOP_IDS + MAX_LOGIT_BIAS  # float32


PARAMS_WIDTH = Column.BIAS_VALUES + MAX_LOGIT_BIAS

_ROW = struct.Struct(f"=2I7i7f{MAX_STOP_IDS}i{MAX_LOGIT_BIAS}i{MAX_LOGIT_BIAS}f")
_INTS = struct.Struct(f"={PARAMS_WIDTH}i")
_WORD = 2**32 - 1
_INT_MAX = 2**31 - 1
_FLOAT_MIN = 2.0**-126  # the least positive normal float32
_FLOAT_MAX = (2.0 - 2.0**-23) * 2.0**127


def encode_params(
    *,
    prompt_len: int = 0,
    seed: int = 0,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    min_tokens: int = 0,
    stop_token_ids: Sequence[int] = (),
    logit_bias: Mapping[int, float] | None = None,
    top_logprobs: int = 0,
    exit_threshold: float = NEVER,
    exit_copy: bool = False,
) -> tuple[int, ...]:
    """The row ``[PARAMS_WIDTH]`` of one request. Without arguments: greedy, through all depths.

    ``seed`` is taken modulo 2**64. ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 are off. ``stop_token_ids`` are what
    ``min_tokens`` bans. ``exit_copy`` allows `Ops.copy_exits`. Raises `RequestError` for a value outside its range
    (token ids: only negative ones; the vocabulary is not known here).
    """
    bias = dict(logit_bias or {})
    for name, value, low, high in (
        ("prompt_len", prompt_len, 0, _INT_MAX),
        ("min_tokens", min_tokens, 0, _INT_MAX),
        ("top_k", top_k, 0, _INT_MAX),
        ("top_logprobs", top_logprobs, 0, MAX_TOP_LOGPROBS),
        ("stop_token_ids: count", len(stop_token_ids), 0, MAX_STOP_IDS),
        ("logit_bias: count", len(bias), 0, MAX_LOGIT_BIAS),
        ("temperature", temperature, 0.0, _FLOAT_MAX),
        ("top_p", top_p, _FLOAT_MIN, 1.0),
        ("min_p", min_p, 0.0, 1.0),
        ("repetition_penalty", repetition_penalty, _FLOAT_MIN, _FLOAT_MAX),
        ("presence_penalty", presence_penalty, -_FLOAT_MAX, _FLOAT_MAX),
        ("frequency_penalty", frequency_penalty, -_FLOAT_MAX, _FLOAT_MAX),
        ("exit_threshold", exit_threshold, 0.0, math.inf),
        *((f"stop_token_ids[{index}]", token, 0, _INT_MAX) for index, token in enumerate(stop_token_ids)),
        *((f"logit_bias: token {token}", token, 0, _INT_MAX) for token in bias),
        *((f"logit_bias[{token}]", value, -_FLOAT_MAX, _FLOAT_MAX) for token, value in bias.items()),
    ):
        if not low <= value <= high:
            raise RequestError(f"{name}: must be in {low}..{high}, got {value}")
    return _INTS.unpack(
        _ROW.pack(
            seed & _WORD,
            (seed >> 32) & _WORD,
            prompt_len,
            min_tokens,
            top_k,
            top_logprobs,
            len(stop_token_ids),
            len(bias),
            exit_copy,
            temperature,
            top_p,
            min_p,
            repetition_penalty,
            presence_penalty,
            frequency_penalty,
            exit_threshold,
            *_filled(stop_token_ids, MAX_STOP_IDS),
            *_filled(list(bias), MAX_LOGIT_BIAS),
            *_filled(list(bias.values()), MAX_LOGIT_BIAS),
        )
    )


def _filled(values: Sequence[float], length: int) -> list[float]:
    """``values`` and zeros up to ``length``: a bias of zero on token 0 changes nothing."""
    return [*values, *[0] * (length - len(values))]
