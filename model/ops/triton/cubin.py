"""Kernels that were compiled before, launched through cuda-python: no compiler of any kind is needed, nor Triton."""

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from wavegraph.errors import BundleError
from wavegraph.model.cuda_driver import SCRATCH, Argument, Kernel
from wavegraph.model.ops.triton.launch import KernelSpec, Launch, Value


@dataclass(frozen=True, slots=True)
class Cubin:
    """A binary on disk: ``entry`` is its function, which takes ``shared`` bytes of dynamic shared memory."""

    path: Path
    entry: str
    shared: int


class CubinLauncher:
    """Launches kernels of ``cubins``, keyed by `KernelSpec.name`, on torch's current stream.

    A kernel is loaded when it is first launched: while programs are warmed up, before they are captured. One that is
    missing raises `BundleError`.
    """

    def __init__(self, cubins: Mapping[str, Cubin]) -> None:
        self._cubins = cubins
        self._loaded: dict[KernelSpec, Kernel] = {}

    def __call__(self, launch: Launch) -> None:
        """Run one launch. Raises `DriverError` if the device refuses it."""
        kernel = self._loaded.get(launch.spec)
        if kernel is None:
            kernel = self._loaded[launch.spec] = self._load(launch.spec)
        arguments = (*map(_argument, launch.values), *SCRATCH)
        kernel.launch(launch.grid, torch.cuda.current_stream().cuda_stream, arguments)

    def _load(self, spec: KernelSpec) -> Kernel:
        cubin = self._cubins.get(spec.name)
        if cubin is None:
            constants = ", ".join(f"{name}={value}" for name, value in spec.constants)
            raise BundleError(
                f"kernel {spec.kernel} ({constants}) is not in the bundle; precompile it anew with this version"
            )
        return Kernel(cubin.path.read_bytes(), cubin.entry, shared=cubin.shared, warps=spec.num_warps)


def _argument(value: Value) -> Argument:
    if isinstance(value, Tensor):
        return value.data_ptr(), ctypes.c_void_p
    return value, ctypes.c_float if isinstance(value, float) else ctypes.c_int32
