"""The `recorded` backend: the contract of a CUDA graph, kept on a CPU.

A program is recorded as a tape of operator calls over fixed storages and replayed without any model code. Its
intermediates lie in one arena, which all tapes of a backend share, as graphs share a memory pool: capture the
largest bucket first, and the others fit in it. Results must be left in static tensors.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from wavegraph.capture.backends.base import Backend, Program, Recording
from wavegraph.capture.backends.lowering import lower
from wavegraph.capture.backends.tape import StorageUse, Tape, TensorRef, record
from wavegraph.capture.static import StaticSet

_ALIGNMENT = 64  # that of torch's own CPU allocator: the same vector paths are taken as without recording


class RecordedBackend(Backend):
    """Records operator tapes. ``arena`` is the uint8 memory of intermediates, meaningless between replays."""

    name = "recorded"

    def __init__(self) -> None:
        super().__init__()
        self.arena = torch.empty(0, dtype=torch.uint8)

    def _record(self, program: Program, static: StaticSet, name: str) -> Recording:
        tape = record(program, static, name)
        offsets, nbytes = plan_arena(tape.storages)
        if nbytes > self.arena.numel():
            # Earlier tapes keep the smaller arena they were bound to.
            self.arena = torch.empty(nbytes, dtype=torch.uint8)
        binder = _Binder(tape, offsets, self.arena)
        calls = tuple(lower(call, binder) for call in tape.calls)

        def run() -> None:
            for call in calls:
                call()

        return Recording(run, len(calls), nbytes, binder.tensors)


def plan_arena(storages: Sequence[StorageUse]) -> tuple[list[int], int]:
    """Byte offset of each storage (0 for static ones) and the arena's size.

    Storages whose lives overlap get disjoint places. A dead one's place goes to the next of its size: layers
    repeat the same shapes, so little is lost to storages of different sizes.
    """
    offsets = [0] * len(storages)
    free: dict[int, list[int]] = {}
    living: list[tuple[int, int, int]] = []  # (last, size, offset)
    total = 0
    made = [number for number, use in enumerate(storages) if use.static is None]
    for number in sorted(made, key=lambda number: storages[number].first):
        use = storages[number]
        for _, size, offset in (dead for dead in living if dead[0] < use.first):
            free.setdefault(size, []).append(offset)
        living = [other for other in living if other[0] >= use.first]
        size = -(-use.nbytes // _ALIGNMENT) * _ALIGNMENT
        places = free.get(size)
        if places:
            offsets[number] = places.pop()
        else:
            offsets[number] = total
            total += size
        living.append((use.last, size, offsets[number]))
    return offsets, total


class _Binder:
    """Makes the tensors of a tape at their final places, each distinct one once."""

    def __init__(self, tape: Tape, offsets: Sequence[int], arena: Tensor) -> None:
        self._storages = [
            (arena.untyped_storage(), offset) if use.static is None else (use.static, 0)
            for use, offset in zip(tape.storages, offsets, strict=True)
        ]
        self._made: dict[TensorRef, Tensor] = {}

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors made so far."""
        return list(self._made.values())

    def __call__(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self(item) for item in value]
        if not isinstance(value, TensorRef):
            return value
        tensor = self._made.get(value)
        if tensor is None:
            storage, offset = self._storages[value.storage]
            tensor = torch.empty(0, dtype=value.dtype, device=storage.device)
            tensor.set_(storage, offset // value.dtype.itemsize + value.offset, value.size, value.stride)
            self._made[value] = tensor
        return tensor
