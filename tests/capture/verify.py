"""Does a recording compute what its program computes? Bit for bit, on inputs that change after capture."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from wavegraph.capture.backends.base import Facts
from wavegraph.capture.backends.recorded import RecordedBackend
from wavegraph.capture.static import StaticSet

NAN_BYTE = 0xFF  # repeated, a NaN in every float dtype and -1 in every integer one


def bits(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, so that NaN equals itself and -0.0 differs from 0.0."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8).clone()


def assert_same_bits(actual: Tensor, expected: Tensor, what: str) -> None:
    assert torch.equal(bits(actual), bits(expected)), f"{what}: bits differ"


def verify_program(
    program: Callable[[], None], tensors: Mapping[str, Tensor], change: Callable[[int], None], rounds: int = 3
) -> Facts:
    """Record ``program``, then compare replays with plain runs, over all static ``tensors``.

    ``change(round)`` writes new inputs before each round: a Python value that was baked in shows. Before each
    replay all intermediates are NaN: one read before it is written shows. Each round replays twice from the
    same state: anything that is kept between replays shows.
    """
    backend = RecordedBackend()
    recorded = backend.capture(program, StaticSet(tensors), "program")
    for number in range(rounds):
        change(number)
        before = {name: tensor.clone() for name, tensor in tensors.items()}
        with torch.no_grad():
            program()
        expected = {name: tensor.clone() for name, tensor in tensors.items()}
        for _ in range(2):
            for name, tensor in tensors.items():
                tensor.copy_(before[name])
            backend.arena.fill_(NAN_BYTE)
            recorded.replay()
            for name, tensor in tensors.items():
                assert_same_bits(tensor, expected[name], f"round {number}, {name}")
    return recorded.facts
