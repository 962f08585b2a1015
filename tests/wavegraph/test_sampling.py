from typing import Any

import pytest

from wavegraph.errors import RequestError
from wavegraph.sampling import SamplingParams


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"max_tokens": 0}, "max_tokens must be an integer of at least 1, got 0"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"ignore_eos": 1}, "ignore_eos"),
        ({"temperature": 0.7}, "temperature must be 0"),
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


def test_a_list_of_stop_ids_becomes_a_tuple() -> None:
    params = SamplingParams(stop_token_ids=[2, 0])  # type: ignore[arg-type]
    assert params.stop_token_ids == (2, 0)
    assert hash(params) == hash(SamplingParams(stop_token_ids=(2, 0)))
