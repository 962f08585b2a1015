"""Kernels launched from cubins through cuda-python: no compiler of any kind, and nothing of Triton.

Triton's own launcher is C code that it compiles on first use; this one packs a launch's values itself.
"""

import ctypes
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from wavegraph.errors import CaptureError, EngineError
from wavegraph.model.ops.triton.compile import Binary
from wavegraph.model.ops.triton.launch import KernelSpec, Launch

_STATIC_SHARED = 48 * 1024
"""Bytes of shared memory that a kernel may have without asking."""

_TYPES = {"i32": ctypes.c_int32, "fp32": ctypes.c_float}
_SCRATCH = (0, 0)  # what a cubin of Triton takes last: two pointers, unused by these kernels


class CubinLauncher:
    """A `wavegraph.model.ops.triton.launch.Launcher` of loaded binaries.

    All are loaded at once: loading one while a graph is captured is forbidden. The device's context must be current
    (``torch.cuda.init``), and ``driver`` is ``cuda.bindings.driver``. Launches go to torch's current stream. Raises
    `EngineError` with the driver's words if a binary cannot be loaded; then none stays loaded.
    """

    def __init__(self, binaries: Iterable[Binary], driver: Any) -> None:
        self._driver = driver
        self._modules: list[Any] = []
        self._functions: dict[KernelSpec, tuple[Any, int]] = {}
        done = False
        try:
            for binary in binaries:
                self._functions[binary.spec] = self._load(binary), binary.shared
            done = True
        finally:
            if not done:
                self.close()

    def __call__(self, launch: Launch) -> None:
        """Launch. Raises `CaptureError` for a spec that was not loaded, `EngineError` if the driver refuses."""
        spec = launch.spec
        if spec not in self._functions:
            raise CaptureError(f"{spec.name}: was not precompiled; make the bundle again for this model and ladder")
        function, shared = self._functions[spec]
        values = tuple(value.data_ptr() if isinstance(value, Tensor) else value for value in launch.values) + _SCRATCH
        types = tuple(_TYPES.get(kind, ctypes.c_void_p) for _, kind in spec.arguments) + (ctypes.c_void_p,) * 2
        stream = torch.cuda.current_stream().cuda_stream
        threads = 32 * spec.num_warps
        self._call("cuLaunchKernel", spec, function, *launch.grid, 1, threads, 1, 1, shared, stream, (values, types), 0)

    def close(self) -> None:
        """Unload all binaries; no graph that launches them may be replayed afterwards."""
        self._functions = {}
        while self._modules:
            self._driver.cuModuleUnload(self._modules.pop())

    def _load(self, binary: Binary) -> Any:
        (module,) = self._call("cuModuleLoadData", binary.spec, binary.cubin)
        self._modules.append(module)
        (function,) = self._call("cuModuleGetFunction", binary.spec, module, binary.entry.encode())
        if binary.shared > _STATIC_SHARED:
            attribute = self._driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            self._call("cuFuncSetAttribute", binary.spec, function, attribute, binary.shared)
        return function

    def _call(self, name: str, spec: KernelSpec, *args: Any) -> tuple[Any, ...]:
        result, *values = getattr(self._driver, name)(*args)
        if result != self._driver.CUresult.CUDA_SUCCESS:
            words = self._driver.cuGetErrorString(result)[1]
            raise EngineError(f"{spec.name}: {name} failed ({words.decode()}); check that the bundle fits this device")
        return tuple(values)
