"""Canaries: memory before and after each static tensor that no program may touch."""

from collections.abc import Sequence

import torch
from torch import Tensor

from wavegraph.capture.static import StaticSet
from wavegraph.errors import CaptureError

GUARD_BYTES = 256  # on either side; a multiple of what torch aligns to
_CANARY = 0xA5


class Guards:
    """Allocates zeroed tensors between two canaries, and looks whether they live."""

    def __init__(self) -> None:
        self._storages: list[Tensor] = []

    def zeros(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """As `torch.zeros`, but with a guard of `GUARD_BYTES` on both sides in its storage."""
        nbytes = torch.Size(size).numel() * dtype.itemsize
        storage = torch.zeros(nbytes + 2 * GUARD_BYTES, dtype=torch.uint8, device=device)
        storage[:GUARD_BYTES] = storage[GUARD_BYTES + nbytes :] = _CANARY
        self._storages.append(storage)
        return storage[GUARD_BYTES : GUARD_BYTES + nbytes].view(dtype).view(*size)

    def check(self, static: StaticSet) -> None:
        """Raise `CaptureError` naming the tensor of ``static`` beside which something was written."""
        for storage in self._storages:
            for side, guard in (("before", storage[:GUARD_BYTES]), ("after", storage[-GUARD_BYTES:])):
                if not bool((guard == _CANARY).all()):
                    address = storage.data_ptr()
                    name = next(name for name, known in static.storages.items() if known.data_ptr() == address)
                    raise CaptureError(f"{name}: something wrote {side} it; an operator left its tensors")
