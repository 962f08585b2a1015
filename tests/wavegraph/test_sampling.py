from typing import Any

import pytest

from wavegraph.errors import RequestError
from wavegraph.model.sampling import FEATURE_SAMPLER, PARAMS_WIDTH
from wavegraph.sampling import SamplingParams
from wavegraph.scheduler.plan import ExitRule


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"max_tokens": 0}, "max_tokens must be an integer of at least 1, got 0"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"ignore_eos": 1}, "ignore_eos"),
        ({"temperature": -0.7}, "temperature must be a number in [0, 100], got -0.7"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0}, "top_p must be a number in (0, 1], got 0"),
        ({"top_p": 1.01}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"n": 0}, "n must be"),
        ({"n": 129}, "n must be"),
        ({"seed": 1.5}, "seed"),
        ({"seed": 2**64}, "seed"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"presence_penalty": "1"}, "presence_penalty"),
        ({"logprobs": 21}, "logprobs must be an integer in 0..20"),
        ({"prompt_logprobs": True}, "prompt_logprobs"),
        ({"min_tokens": 17}, "min_tokens must be an integer in 0..16"),
        ({"stop": [""]}, "stop: each must be a non-empty string"),
        ({"stop": ["a"] * 17}, "at most 16"),
        ({"stop": 3}, "stop must be a tuple"),
        ({"stop_token_ids": tuple(range(17))}, "at most 16"),
        ({"logit_bias": dict.fromkeys(range(65), 1.0)}, "at most 64"),
        ({"logit_bias": {1: float("inf")}}, "logit_bias[1]"),
        ({"logit_bias": {"1": 1.0}}, "'1' is not a token id"),
        ({"logit_bias": [1]}, "logit_bias must map"),
        ({"max_loops": 0}, "max_loops"),
        ({"min_loops": 3, "max_loops": 2}, "min_loops=3 exceeds max_loops=2"),
        ({"exit_at_step": -1}, "exit_at_step"),
        ({"exit_at_step": 1, "exit_threshold": 0.5}, "exit_threshold has no meaning beside it"),
        ({"exit_threshold": -0.1}, "exit_threshold"),
        ({"exit_threshold": float("nan")}, "exit_threshold"),
        ({"exit_kv": "shared"}, "exit_kv must be 'exact' or 'copy'"),
        ({"temperature": False}, "temperature"),
        ({"temperature": "0"}, "temperature"),
        ({"stop_token_ids": 3}, "stop_token_ids must be a tuple"),
        ({"stop_token_ids": (-1,)}, "-1 is not a token id"),
        ({"stop_token_ids": (True,)}, "True is not a token id"),
        ({"stop_token_ids": "12"}, "stop_token_ids must be a tuple"),
    ],
)
def test_bad_params_are_named(options: dict[str, Any], named: str) -> None:
    with pytest.raises(RequestError) as refused:
        SamplingParams(**options)
    assert named in str(refused.value)


def test_lists_and_single_strings_become_tuples() -> None:
    params = SamplingParams(stop_token_ids=[2, 0], stop="end")  # type: ignore[arg-type]
    assert (params.stop_token_ids, params.stop) == ((2, 0), ("end",))


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({}, None),
        ({"max_loops": 4}, None),
        ({"exit_threshold": 1.0}, None),
        ({"exit_threshold": 7}, None),
        ({"exit_kv": "copy"}, None),
        ({"exit_at_step": 3}, None),
        ({"max_loops": 2}, ExitRule(1, 1)),
        ({"exit_at_step": 0, "exit_kv": "copy"}, ExitRule(0, 0, copy=True)),
        ({"exit_threshold": 0.5}, ExitRule(3, 0, gated=True)),
        ({"exit_threshold": 0.5, "min_loops": 2, "max_loops": 3}, ExitRule(2, 1, gated=True)),
        ({"exit_threshold": 0.5, "min_loops": 4}, None),
    ],
)
def test_exit_rules(options: dict[str, Any], rule: ExitRule | None) -> None:
    assert SamplingParams(**options).exit_rule(4) == rule


@pytest.mark.parametrize("options", [{"max_loops": 5}, {"min_loops": 5}, {"exit_at_step": 4}])
def test_more_loops_than_the_model_has_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="4 loops"):
        SamplingParams(**options).exit_rule(4)


def test_a_plain_request_needs_no_parameters_on_the_device() -> None:
    plain = SamplingParams()
    assert (plain.device_params(5, frozenset({0}), 0, 7), plain.coda_features) == ((), 0)
    drawn = SamplingParams(temperature=1.0)
    assert (len(drawn.device_params(5, frozenset({0}), 0, 7)), drawn.coda_features) == (PARAMS_WIDTH, FEATURE_SAMPLER)
    gated = SamplingParams(exit_threshold=0.5)
    assert (len(gated.device_params(5, frozenset({0}), 0, 7)), gated.coda_features) == (PARAMS_WIDTH, 0)
