"""How these tests launch kernels: through Triton's interpreter, or on a GPU, over the same tensors on the CPU."""

import os

import torch
from torch import Tensor

from wavegraph.model.ops.triton.launch import JitLauncher, Launch, Launcher, Value

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


class ThroughGpu:
    """Takes the tensors of each launch to the GPU, launches, and brings back all that they hold then."""

    def __init__(self, launcher: Launcher, device: str = "cuda") -> None:
        self._launcher, self._device = launcher, device

    def __call__(self, launch: Launch) -> None:
        """Run one launch; a tensor that is given twice is one there too."""
        there: dict[int, tuple[Tensor, Tensor]] = {}

        def moved(value: Value) -> Value:
            if not isinstance(value, Tensor):
                return value
            return there.setdefault(value.data_ptr(), (value, value.to(self._device, copy=True)))[1]

        self._launcher(Launch(launch.spec, launch.grid, tuple(map(moved, launch.values))))
        for here, copy in there.values():
            here.copy_(copy)


def make_launcher() -> Launcher:
    """The launcher of this process."""
    return JitLauncher() if INTERPRETED else ThroughGpu(JitLauncher())


def can_run() -> bool:
    """Whether kernels run here at all."""
    return INTERPRETED or torch.cuda.is_available()
