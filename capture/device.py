"""Where programs run: the order of work on the device, events in it, and memory. All in which CPU and CUDA differ.

On CUDA one stream, which is not the default one, carries everything: captures, copies both ways, replays, and pages
that move between pools and host. So what is submitted later sees what was submitted earlier, and a page is free for
the next step as soon as the copy out of it was submitted. What the host reads or overwrites is guarded by an event.
"""

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, cuda


class Event(Protocol):
    """A point in the order of a device's work. One that was never recorded has passed."""

    def record(self) -> object:
        """Set the point behind all that was submitted so far to the stream that is current."""
        ...

    def query(self) -> bool:
        """Whether the device has passed the point."""
        ...

    def synchronize(self) -> object:
        """Wait until it has."""
        ...


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of a device that nobody uses, and in all."""

    free: int
    total: int


class Device(ABC):
    """``target`` is where tensors live. Other processes' or the device's own failures come as `RuntimeError`."""

    target: torch.device
    queued: bool
    """Whether work that was submitted runs later, beside the host."""

    @abstractmethod
    def running(self) -> AbstractContextManager[object]:
        """A context in which tensor operations are submitted in this device's order."""

    @abstractmethod
    def event(self) -> Event:
        """A new event."""

    @abstractmethod
    def host(self, *size: int, dtype: torch.dtype) -> Tensor:
        """Memory on the host, not set to anything, that the device copies from and to without the host's help."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until all that was submitted in `running` has run."""

    @abstractmethod
    def settle(self) -> None:
        """Wait for all work on the device, also what was not submitted in `running`; give unused memory back to it."""


class _Passed:
    """The event of a device that does its work at once."""

    def record(self) -> None:
        return

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return


class CpuDevice(Device):
    """Runs everything at once, on the thread that asks."""

    def __init__(self) -> None:
        self.target = torch.device("cpu")
        self.queued = False

    def running(self) -> AbstractContextManager[object]:
        """Nothing is to be set."""
        return nullcontext()

    def event(self) -> Event:
        """An event that has always passed."""
        return _Passed()

    def host(self, *size: int, dtype: torch.dtype) -> Tensor:
        """Ordinary memory."""
        return torch.empty(size, dtype=dtype)

    def synchronize(self) -> None:
        """Everything has run."""

    def settle(self) -> None:
        """Everything has run, and memory is the system's affair."""


class CudaDevice(Device):
    """The GPU ``index`` of those that torch sees, and one stream of it. Needs `torch.cuda` to be available."""

    def __init__(self, index: int = 0) -> None:
        self.index = index
        self.target = torch.device("cuda", index)
        self.queued = True
        self.stream = cuda.Stream(self.index)  # type: ignore[no-untyped-call]

    def running(self) -> AbstractContextManager[object]:
        """The stream is the current one, and the GPU the current device."""
        return cuda.stream(self.stream)

    def event(self) -> Event:
        """A CUDA event without timing, which is the cheaper kind."""
        event: Event = cuda.Event()  # type: ignore[no-untyped-call]
        return event

    def host(self, *size: int, dtype: torch.dtype) -> Tensor:
        """Pinned memory. Once let go of, it is not given out again before the copies from and to it have ended."""
        return torch.empty(size, dtype=dtype, pin_memory=True)

    def synchronize(self) -> None:
        """Wait for the stream."""
        self.stream.synchronize()

    def settle(self) -> None:
        """Wait for all streams of the GPU, and give memory that torch keeps for later back to it."""
        cuda.synchronize(self.index)
        cuda.empty_cache()

    @property
    def architecture(self) -> str:
        """Its compute capability as the name of a compilation target, such as ``sm_90``."""
        major, minor = cuda.get_device_capability(self.index)
        return f"sm_{major}{minor}"

    @property
    def multiprocessors(self) -> int:
        """How many blocks can run at the least at one time."""
        return int(cuda.get_device_properties(self.index).multi_processor_count)

    def memory(self) -> Memory:
        """What the driver says: it counts other processes and recorded graphs too."""
        return Memory(*cuda.mem_get_info(self.index))
