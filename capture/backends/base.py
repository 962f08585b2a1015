"""What every way of running a recorded program has in common.

::

    backend.capture(program, static, name) -> Recorded   records (or only keeps) a program
    recorded.replay()                                    runs it again, on what static tensors then hold
    recorded.facts                                       nodes, bytes, and the seconds it took to record
    backend.session()                                    holds all captures of a start-up
    backend.freeze()                                     no capture after this one
    backend.release()                                    give back what recordings hold

A program takes nothing, and what it returns is dropped: it reads and writes static tensors only, its shapes
never depend on data, and it never waits for the host.
"""

import hashlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from wavegraph.capture.device import CpuDevice, Device
from wavegraph.capture.static import StaticSet
from wavegraph.errors import CaptureError

Program = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Facts:
    """What a recording is: operator calls of a replay, bytes of its intermediates, seconds to record it."""

    nodes: int
    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Recording:
    """What a backend makes of a program: ``run`` repeats it, over ``tensors`` whose addresses it holds."""

    run: Program
    nodes: int = 0
    bytes: int = 0
    tensors: Sequence[Tensor] = ()


class Recorded:
    """A program that can be run again. ``addresses`` is a digest of where all that it touches lay when it was made."""

    __slots__ = ("_run", "_static", "_tensors", "addresses", "facts", "name")

    def __init__(self, name: str, static: StaticSet, recording: Recording, seconds: float) -> None:
        self.name = name
        self.facts = Facts(recording.nodes, recording.bytes, seconds)
        self._static = static
        self._run = recording.run
        self._tensors = tuple(recording.tensors)
        self.addresses = _addresses(self._tensors)

    def replay(self) -> None:
        """Run the program on the present contents of the static tensors.

        Raises `CaptureError`, before anything runs, if a static tensor has moved or changed size.
        """
        self._static.check()
        with torch.no_grad():
            self._run()

    def check_addresses(self) -> None:
        """Raise `CaptureError` if any tensor that a replay touches, intermediates too, lies elsewhere than before."""
        found = _addresses(self._tensors)
        if found != self.addresses:
            raise CaptureError(
                f"{self.name}: addresses it holds changed since its capture (digest {found}, was {self.addresses}); "
                "capture again"
            )


def _addresses(tensors: Sequence[Tensor]) -> str:
    places = [(tensor.data_ptr(), tensor.untyped_storage().nbytes()) for tensor in tensors]
    return hashlib.sha256(repr(places).encode()).hexdigest()[:16]


class Backend(ABC):
    """Records programs. One backend serves one set of static tensors, and its recordings may share memory.

    ``device`` is where those tensors live and replays run; None is the CPU.
    """

    name: ClassVar[str]

    def __init__(self, device: Device | None = None) -> None:
        self.device = device if device is not None else CpuDevice()
        self._frozen = False

    @contextmanager
    def session(self) -> Iterator[None]:
        """Within this the programs of one start-up are captured, in the device's order, behind all other work."""
        self.device.settle()
        with self.device.running():
            yield

    def release(self) -> None:
        """Give back the memory of recordings, none of which may be replayed afterwards. May be called twice."""
        return

    def capture(self, program: Program, static: StaticSet, name: str) -> Recorded:
        """Record ``program`` under ``name``, running it once on the present contents of ``static``.

        Raises `CaptureError` after `freeze`, if a static tensor has moved, or if the program cannot be
        recorded. Errors of the program itself pass through.
        """
        if self._frozen:
            raise CaptureError(f"{name}: capture is forbidden after start-up; add its bucket to the ladder instead")
        static.check()
        started = time.perf_counter()
        with torch.no_grad():
            recording = self._record(program, static, name)
        return Recorded(name, static, recording, time.perf_counter() - started)

    def freeze(self) -> None:
        """Forbid every later capture."""
        self._frozen = True

    @abstractmethod
    def _record(self, program: Program, static: StaticSet, name: str) -> Recording:
        """Run the program once, and make of it what a replay runs."""
