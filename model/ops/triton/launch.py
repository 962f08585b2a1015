"""How kernels are launched: one plain description of each launch, and who carries it out.

`wavegraph.model.ops.triton.ops` describes launches; a `Launcher` runs them. `JitLauncher` gives them to Triton (its JIT
compiler, or its interpreter); `Recorder` only notes them, so that the kernels a program needs are found by running the
program, on tensors without memory if need be. A `KernelSpec` holds all that a binary is compiled for, so it is also
the key under which a launcher of precompiled binaries finds one. Nothing here needs Triton until it is used.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from wavegraph.errors import CaptureError

ALIGNMENT = 16
"""Bytes; tensors of parameters named ``*_ptr`` start at a multiple of it, and binaries are compiled for that."""

_POINTERS = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
_INT_MAX = 2**31 - 1

Value = Tensor | int | float
Constant = int | str


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """What one binary is compiled for.

    ``arguments`` are the name and Triton type of each argument of a launch, in order; ``constants`` the name and value
    of each compile-time constant; ``fp_fusion`` whether a product and a sum may become one fused operation.
    """

    kernel: str
    arguments: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Constant], ...]
    num_warps: int
    num_stages: int
    fp_fusion: bool

    @property
    def name(self) -> str:
        """A file name: that of the kernel, and a digest of the rest."""
        return f"{self.kernel}-{hashlib.sha256(repr(self).encode()).hexdigest()[:12]}"

    @property
    def aligned(self) -> tuple[int, ...]:
        """Places of the arguments that start at a multiple of `ALIGNMENT`."""
        return tuple(index for index, (name, _) in enumerate(self.arguments) if name.endswith("_ptr"))


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch: ``values`` are those of the spec's arguments, ``grid`` the number of programs in each dimension."""

    spec: KernelSpec
    grid: tuple[int, int]
    values: tuple[Value, ...]


class Launcher(Protocol):
    """Carries out launches, in order, on the current stream."""

    def __call__(self, launch: Launch) -> None:
        """Run one launch."""
        ...


def describe(
    kernel: str,
    grid: tuple[int, int],
    arguments: Mapping[str, Value],
    constants: Mapping[str, Constant],
    *,
    num_warps: int,
    num_stages: int = 1,
    fp_fusion: bool = True,
) -> Launch:
    """The launch of a kernel. ``arguments`` stand in the order of its parameters.

    Raises `CaptureError` for a tensor that is not contiguous, has a dtype that no kernel takes or starts where its
    kernel does not expect it, and for an integer beyond 32 bits.
    """
    types = tuple((name, _type_of(kernel, name, value)) for name, value in arguments.items())
    spec = KernelSpec(kernel, types, tuple(constants.items()), num_warps, num_stages, fp_fusion)
    return Launch(spec, grid, tuple(arguments.values()))


def _type_of(kernel: str, name: str, value: Value) -> str:
    if isinstance(value, float):
        return "fp32"
    if isinstance(value, int):
        if not -_INT_MAX <= value <= _INT_MAX:
            raise CaptureError(f"{kernel}: {name} is {value}, beyond 32 bits; lower the engine's limits")
        return "i32"
    if value.dtype not in _POINTERS:
        raise CaptureError(f"{kernel}: {name} is {value.dtype}; the kernels take float32, bfloat16, float16 and int32")
    if not value.is_contiguous():
        raise CaptureError(f"{kernel}: {name} of shape {list(value.shape)} is not contiguous; give it as one block")
    if name.endswith("_ptr") and value.data_ptr() % ALIGNMENT:
        raise CaptureError(f"{kernel}: {name} must start at a multiple of {ALIGNMENT} bytes; allocate it by itself")
    return _POINTERS[value.dtype]


class JitLauncher:
    """Launches through Triton: its compiler for tensors on a GPU, its interpreter where ``TRITON_INTERPRET=1`` is set.

    Raises ImportError without Triton.
    """

    def __init__(self) -> None:
        self._kernels = load_kernels()

    def __call__(self, launch: Launch) -> None:
        """Run one launch, compiling its kernel if that is new."""
        spec = launch.spec
        names = (name for name, _ in spec.arguments)
        options = {"num_warps": spec.num_warps, "num_stages": spec.num_stages, "enable_fp_fusion": spec.fp_fusion}
        arguments = dict(zip(names, launch.values, strict=True)) | dict(spec.constants) | options
        self._kernels[spec.kernel][launch.grid](**arguments)


class Recorder:
    """Notes the specs that a program launches, each once and in order, and runs nothing."""

    def __init__(self) -> None:
        self.launches: dict[KernelSpec, int] = {}
        """How often each spec was launched."""

    def __call__(self, launch: Launch) -> None:
        """Note one launch."""
        self.launches[launch.spec] = self.launches.get(launch.spec, 0) + 1


@cache
def load_kernels() -> Mapping[str, Any]:
    """The kernels by name. Raises ImportError without Triton."""
    from wavegraph.model.ops.triton.kernels import KERNELS

    return KERNELS
