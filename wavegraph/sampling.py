"""How tokens are chosen, where they leave the loop, and when a request ends."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from wavegraph.errors import RequestError
from wavegraph.model.sampling import FEATURE_SAMPLER, MAX_LOGIT_BIAS, MAX_STOP_IDS, MAX_TOP_LOGPROBS, encode_params
from wavegraph.scheduler.plan import ExitRule

MAX_STOP_STRINGS = 16
MAX_N = 128
EXIT_KV = ("exact", "copy")


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Parameters of one request. A bad value raises `RequestError` with a sentence that names it.

    Length and end:

    - ``max_tokens``: the most tokens to generate, at least 1. A request also ends at the engine's
      ``max_model_len``.
    - ``min_tokens``: stop ids and end-of-sequence cannot be drawn before so many tokens, and stop strings that they
      complete end nothing, as in vLLM.
    - ``stop``: strings that end the request; the text ends before the match, or after it with
      ``include_stop_str_in_output``. At most 16.
    - ``stop_token_ids``: ids that end the request when drawn, besides the model's own end-of-sequence ids. At most
      16 with those. The token is kept in ``token_ids`` and left out of ``text``.
    - ``ignore_eos``: go on past the model's end-of-sequence ids (``stop_token_ids`` still end the request).
    - ``n``: independent outputs of one prompt, at most 128; output i draws with ``seed + i``.

    Choice of tokens, applied in this order; see `wavegraph.model.sampling` for the exact rules:

    - ``repetition_penalty`` (1: off), ``presence_penalty``, ``frequency_penalty`` (0: off), as in vLLM.
    - ``logit_bias``: added to the logits of up to 64 token ids.
    - ``temperature``: 0 is greedy; ``top_k`` (0: off), ``top_p`` (1: off), ``min_p`` (0: off).
    - ``seed``: an integer makes the draws repeat, whatever else runs in the batch; None draws a fresh one.

    Report:

    - ``logprobs``: None, or how many alternatives (0..20) to report beside each token's log-probability.
    - ``prompt_logprobs``: the same for each prompt token but the first. Bypasses the prefix cache; full depth only.
    - ``skip_special_tokens``: leave special tokens out of ``text``.

    Depth, for decoded tokens (counts are one-based, steps zero-based, as in the reference):

    - ``max_loops``, ``min_loops``: run at most, at least so many loops of a token. None: all, one.
    - ``exit_threshold``: leave at the first loop whose cumulative exit probability is at least this. None or
      >= 1: the gate is not asked. Computed in float32; the reference rounds to the model's dtype, where in
      bfloat16 a sum above about 0.998 reads as 1 and so even 1.0 lets tokens leave.
    - ``exit_at_step``: always leave after this loop (0-based).
    - ``exit_kv``: ``"exact"`` fills every plane of every token, as the reference does: a token is given out at
      its exit and its remaining loops run beside the next token's; the last prompt position may leave early too.
      ``"copy"`` copies the exit loop's KV into the deeper planes instead, which saves the work and changes what
      later tokens see; prompt and first token run at full depth.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    n: int = 1
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    max_loops: int | None = None
    min_loops: int | None = None
    exit_threshold: float | None = None
    exit_at_step: int | None = None
    exit_kv: str = "exact"

    def __post_init__(self) -> None:
        self._normalise()
        _integer("max_tokens", self.max_tokens, 1)
        _integer("min_tokens", self.min_tokens, 0, self.max_tokens)
        _integer("n", self.n, 1, MAX_N)
        _integer("top_k", self.top_k, 0, 2**31 - 1)
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if type(getattr(self, name)) is not bool:
                raise RequestError(f"{name} must be True or False, got {getattr(self, name)!r}")
        _number("temperature", self.temperature, 0.0, 100.0)
        _number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("repetition_penalty", self.repetition_penalty, 0.0, 100.0, open_low=True)
        _number("presence_penalty", self.presence_penalty, -100.0, 100.0)
        _number("frequency_penalty", self.frequency_penalty, -100.0, 100.0)
        if self.seed is not None:
            _integer("seed", self.seed, -(2**63), 2**64 - 1)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), 0, MAX_TOP_LOGPROBS)
        self._check_ids_and_strings()
        self._check_exits()

    @property
    def needs_sampler(self) -> bool:
        """Whether CODA's greedy program is not enough."""
        return bool(
            self.temperature > 0
            or self.uses_penalties
            or self.logit_bias
            or self.min_tokens
            or self.logprobs is not None
            or self.prompt_logprobs is not None
        )

    @property
    def uses_penalties(self) -> bool:
        """Whether CODA looks back at the request's tokens."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)

    @property
    def coda_features(self) -> int:
        """The features of CODA that this request needs, as the bits of `StepPlan.coda_features`."""
        return FEATURE_SAMPLER if self.needs_sampler else 0

    def exit_rule(self, depths: int) -> ExitRule | None:
        """Where tokens leave a model of ``depths`` loops; None for full depth. Raises `RequestError`."""
        last = depths - 1
        for name, limit in (("max_loops", depths), ("min_loops", depths), ("exit_at_step", last)):
            value = getattr(self, name)
            if value is not None and value > limit:
                raise RequestError(f"{name}={value} exceeds {limit}, the most for a model of {depths} loops; lower it")
        copy = self.exit_kv == "copy"
        if self.exit_at_step is not None:
            rule = ExitRule(self.exit_at_step, self.exit_at_step, copy=copy)
        else:
            max_depth = last if self.max_loops is None else self.max_loops - 1
            min_depth = 0 if self.min_loops is None else self.min_loops - 1
            gated = self.exit_threshold is not None and self.exit_threshold < 1 and min_depth < max_depth
            rule = ExitRule(max_depth, min_depth if gated else max_depth, gated, copy)
        return None if rule.max_depth == last and not rule.gated else rule

    def device_params(self, prompt_len: int, stop_ids: frozenset[int], index: int, seed: int) -> tuple[int, ...]:
        """The request's row of the device's parameter table; empty if the default row does.

        ``stop_ids`` are all ids that end it; ``index`` is that of the output among ``n``.
        """
        asks_gate = self.exit_threshold is not None and self.exit_threshold < 1
        if not (self.needs_sampler or asks_gate or self.exit_kv == "copy"):
            return ()
        return encode_params(
            prompt_len=prompt_len,
            seed=seed + index,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            min_tokens=self.min_tokens,
            stop_token_ids=sorted(stop_ids) if self.min_tokens else (),
            logit_bias=self.logit_bias,
            top_logprobs=max(self.logprobs or 0, self.prompt_logprobs or 0),
            exit_threshold=self.exit_threshold if asks_gate and self.exit_threshold is not None else math.inf,
            exit_copy=self.exit_kv == "copy",
        )

    def _normalise(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        for name, value in (("stop", stop), ("stop_token_ids", self.stop_token_ids)):
            if not isinstance(value, tuple | list):
                raise RequestError(f"{name} must be a tuple, got {value!r}")
            object.__setattr__(self, name, tuple(value))
        if not isinstance(self.logit_bias, Mapping):
            raise RequestError(f"logit_bias must map token ids to numbers, got {self.logit_bias!r}")
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))

    def _check_ids_and_strings(self) -> None:
        if len(self.stop) > MAX_STOP_STRINGS:
            raise RequestError(f"stop: has {len(self.stop)} strings, but at most {MAX_STOP_STRINGS} are allowed")
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise RequestError(f"stop: each must be a non-empty string, got {text!r}")
        if len(self.stop_token_ids) > MAX_STOP_IDS:
            raise RequestError(f"stop_token_ids: has {len(self.stop_token_ids)} ids, but at most {MAX_STOP_IDS} fit")
        for token in self.stop_token_ids:
            if type(token) is not int or token < 0:
                raise RequestError(f"stop_token_ids: {token!r} is not a token id (an integer of at least 0)")
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise RequestError(f"logit_bias: has {len(self.logit_bias)} entries, but at most {MAX_LOGIT_BIAS} fit")
        for token, value in self.logit_bias.items():
            if type(token) is not int or token < 0:
                raise RequestError(f"logit_bias: {token!r} is not a token id (an integer of at least 0)")
            _number(f"logit_bias[{token}]", value, -1e4, 1e4)

    def _check_exits(self) -> None:
        for name in ("max_loops", "min_loops"):
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), 1)
        if self.exit_at_step is not None:
            _integer("exit_at_step", self.exit_at_step, 0)
            others = [n for n in ("max_loops", "min_loops", "exit_threshold") if getattr(self, n) is not None]
            if others:
                raise RequestError(f"exit_at_step fixes the depth, so {others[0]} has no meaning beside it: give one")
        if self.min_loops is not None and self.max_loops is not None and self.min_loops > self.max_loops:
            raise RequestError(f"min_loops={self.min_loops} exceeds max_loops={self.max_loops}; lower it")
        if self.exit_threshold is not None:
            _number("exit_threshold", self.exit_threshold, 0.0, math.inf)
        if self.exit_kv not in EXIT_KV:
            raise RequestError(f"exit_kv must be 'exact' or 'copy', got {self.exit_kv!r}")


def _integer(name: str, value: Any, low: int, high: int | None = None) -> None:
    if type(value) is not int or value < low or (high is not None and value > high):
        limit = f"of at least {low}" if high is None else f"in {low}..{high}"
        raise RequestError(f"{name} must be an integer {limit}, got {value!r}")


def _number(name: str, value: Any, low: float, high: float, open_low: bool = False) -> None:
    number = type(value) in (int, float)
    if not number or not low <= value <= high or (open_low and value == low):
        bound = f"{'(' if open_low else '['}{low:g}, {high:g}]"
        raise RequestError(f"{name} must be a number in {bound}, got {value!r}")
