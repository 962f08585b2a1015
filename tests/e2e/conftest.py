"""Counts tokens that differed only because two logits were a rounding apart; the summary shows them."""

from collections.abc import Callable, Iterator

import pytest
import torch

from tests.conftest import NEAR_TIES


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def count_near_ties(record_property: Callable[[str, object], None]) -> Callable[[int], None]:
    """Add to the count that the summary shows."""

    def count(ties: int) -> None:
        record_property(NEAR_TIES, ties)

    return count
