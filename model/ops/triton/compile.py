"""Kernels compiled ahead of time, for a chip that need not be there."""

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from wavegraph.errors import ConfigError, EngineError
from wavegraph.model.ops.triton.launch import ALIGNMENT, KernelSpec, load_kernels

SHARED_LIMITS: dict[str, int] = {"sm_80": 166912, "sm_90": 232448, "sm_100": 232448}
"""The targets, and the most bytes of shared memory a block may have there (CUDA C++ Programming Guide, table of
technical specifications: 163 and 227 KiB)."""


@dataclass(frozen=True, slots=True)
class Binary:
    """A kernel for one chip: ``cubin`` holds the function ``entry``, which takes the spec's arguments and two pointers.

    The last two are Triton's scratch memory, unused here (null). A block has ``32 * spec.num_warps`` threads and
    ``shared`` bytes of dynamic shared memory.
    """

    spec: KernelSpec
    target: str
    entry: str
    shared: int
    cubin: bytes


@dataclass(frozen=True, slots=True)
class Resources:
    """What a kernel takes per thread, in registers and bytes. ``stack`` or ``local`` above 0 means spills."""

    registers: int
    stack: int
    local: int


def compile_kernel(spec: KernelSpec, target: str) -> Binary:
    """Compile for ``target``; needs Triton, but neither a driver nor a GPU.

    Raises `ConfigError` for a target that is unknown, or on which the kernel needs more shared memory than a block may
    have, `EngineError` for a kernel that wants what `Binary` rules out.
    """
    if target not in SHARED_LIMITS:
        raise ConfigError(f"target: {target!r} is unknown; use one of {', '.join(SHARED_LIMITS)}")
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = ASTSource(
        fn=load_kernels()[spec.kernel],
        signature=dict(spec.arguments) | {name: "constexpr" for name, _ in spec.constants},
        constexprs=dict(spec.constants),
        attrs={(place,): [["tt.divisibility", ALIGNMENT]] for place in spec.aligned},
    )
    options = {"num_warps": spec.num_warps, "num_stages": spec.num_stages, "enable_fp_fusion": spec.fp_fusion}
    compiled = triton.compile(source, target=GPUTarget("cuda", int(target[3:]), 32), options=options)
    metadata = compiled.metadata
    if metadata.shared > SHARED_LIMITS[target]:
        raise ConfigError(
            f"{spec.kernel}: needs {metadata.shared} bytes of shared memory, but {target} has {SHARED_LIMITS[target]}; "
            "use a smaller head_dim or a 16-bit dtype"
        )
    if metadata.global_scratch_size or metadata.profile_scratch_size:
        raise EngineError(f"{spec.kernel}: asks for scratch memory in its {target} binary, which no launcher gives")
    return Binary(spec, target, metadata.name, metadata.shared, compiled.asm["cubin"])


def resources(cubin: bytes) -> Resources:
    """Read what ptxas wrote into a cubin, by Triton's own copy of cuobjdump."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    found = [re.search(rf"\b{name}:(\d+)", text) for name in ("REG", "STACK", "LOCAL")]
    registers, stack, local = (int(match.group(1)) for match in found if match is not None)
    return Resources(registers, stack, local)
