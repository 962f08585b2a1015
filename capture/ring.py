"""Host memory of steps in flight: what goes to the device, and what comes back."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from wavegraph.capture.device import Device
from wavegraph.capture.metadata import StepLayout
from wavegraph.errors import EngineError
from wavegraph.model.sampling import MAX_TOP_LOGPROBS


@dataclass(frozen=True, slots=True)
class ResultSection:
    """An output of CODA, ``[rows]`` or ``[rows, width]``, in one int32 buffer with all others; floats as their bits."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int

    @property
    def size(self) -> int:
        """Entries in the buffer."""
        return int(np.prod(self.shape))

    def view(self, results: Tensor) -> Tensor:
        """This section of the buffer."""
        return results[self.start : self.start + self.size].view(self.dtype).view(self.shape)


def result_sections(coda_rows: int, vocab_size: int) -> list[ResultSection]:
    """All outputs that the host may want, the tokens first. Names are those of `StepIO`."""
    top = (coda_rows, min(MAX_TOP_LOGPROBS, vocab_size))
    sections: list[ResultSection] = []
    start = 0
    for name, shape, dtype in (
        ("coda_token", (coda_rows,), torch.int32),
        ("coda_logprob", (coda_rows,), torch.float32),
        ("coda_rank", (coda_rows,), torch.int32),
        ("top_ids", top, torch.int32),
        ("top_logprobs", top, torch.float32),
    ):
        sections.append(ResultSection(name, shape, dtype, start))
        start += sections[-1].size
    return sections


@dataclass(frozen=True, slots=True, eq=False)
class Logprobs:
    """Of each coda row, in order: the log-probability and rank of its token, and the T most likely tokens.

    ``logprob [n]`` float32, ``rank [n]`` int32, ``top_ids [n, T]`` int32, ``top_logprobs [n, T]`` float32, of the raw
    logits. The token is the one drawn, or for a scored row the one that follows; rows that neither drew nor
    scored hold numbers without a meaning.
    """

    logprob: NDArray[np.float32]
    rank: NDArray[np.int32]
    top_ids: NDArray[np.int32]
    top_logprobs: NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class Staging:
    """One packed buffer ``[layout.size]`` int32 on the host, as torch and as NumPy see it."""

    tensor: Tensor
    array: NDArray[np.int32]


class HostSlot:
    """Host memory of one step: its packed buffers go in, and its results come out.

    The copies from and to it have ended once ``done`` has passed, which the executor records behind them.
    """

    def __init__(self, size: int, sections: Sequence[ResultSection], device: Device) -> None:
        self._size = size
        self._device = device
        self._staging: list[Staging] = []
        self.done = device.event()
        self.results = device.host(sum(section.size for section in sections), dtype=torch.int32)
        views = {section.name: section.view(self.results) for section in sections}
        self.tokens = views["coda_token"]
        self._scores = [views[name].numpy() for name in ("coda_logprob", "coda_rank", "top_ids", "top_logprobs")]
        self.staging(0)

    def staging(self, part: int) -> Staging:
        """The packed buffer of one part of a step. Parts beyond the first are rare: allocated once wanted, and kept."""
        while len(self._staging) <= part:
            tensor = self._device.host(self._size, dtype=torch.int32)
            self._staging.append(Staging(tensor, tensor.numpy()))
        return self._staging[part]

    def logprobs(self, rows: int) -> Logprobs:
        """A copy of the first ``rows`` rows' log-probabilities."""
        return Logprobs(*(array[:rows].copy() for array in self._scores))


class HostRing:
    """A few `HostSlot`, in memory that the device copies from and to.

    A slot belongs to one step from `take` until `give`, which comes after its event has passed, and is never
    refilled between: no copy in flight can read the next step's values.
    """

    def __init__(self, count: int, layout: StepLayout, vocab_size: int, device: Device) -> None:
        self.count = count
        sections = result_sections(layout.max_coda_rows, vocab_size)
        self._free = deque(HostSlot(layout.size, sections, device) for _ in range(count))

    @property
    def in_flight(self) -> int:
        """Slots taken and not given back."""
        return self.count - len(self._free)

    def take(self) -> HostSlot:
        """The slot that has been free longest. Raises `EngineError` if all are in flight."""
        if not self._free:
            raise EngineError(f"steps in flight: {self.count} of {self.count} submitted and not polled; poll one first")
        return self._free.popleft()

    def give(self, slot: HostSlot) -> None:
        """Return a slot whose step is done."""
        self._free.append(slot)
