"""The CUDA driver through cuda-python: the one place that imports it and knows how its calls answer.

Cubins are loaded and launched here without any compiler, and recorded graphs are looked into. Handles of contexts,
streams and graphs are integers, as PyTorch gives them; all is done in the current context, which PyTorch made.
"""

import ctypes
import importlib
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

Argument = tuple[int | float, type[Any]]
"""A kernel's argument: its value and the ctypes type it is passed as (`ctypes.c_void_p` for an address)."""

_STATIC_SHARED_LIMIT = 48 << 10  # what a kernel may use without asking


class DriverError(RuntimeError):
    """A call of the driver failed. Becomes `CaptureError` or `EngineError` where a step or a capture is known."""


def missing() -> str:
    """Why cuda-python cannot be used here, or an empty string."""
    try:
        _bindings()
    except ImportError as error:
        return f"cuda-python cannot be imported ({error}); install wavegraph[cuda]"
    return ""


@cache
def _bindings() -> Any:
    """`cuda.bindings.driver`, which has no type hints. Raises `ImportError`."""
    return importlib.import_module("cuda.bindings.driver")


def _call(name: str, *args: Any) -> Any:
    """What a driver function returns behind its status: nothing, one value or several. Raises `DriverError`."""
    driver = _bindings()
    status, *values = getattr(driver, name)(*args)
    if int(status) != 0:
        _, text = driver.cuGetErrorString(status)
        raise DriverError(f"{name}: {text.decode() if isinstance(text, bytes) else status}")
    return values[0] if len(values) == 1 else tuple(values)


class Kernel:
    """A kernel of a cubin, loaded into the current context until `unload`.

    ``shared`` is the dynamic shared memory of each launch in bytes, ``warps`` its size in warps of 32 threads. Raises
    `DriverError` for a cubin that is not for this device, or that lacks ``name``.
    """

    def __init__(self, cubin: bytes, name: str, *, shared: int, warps: int) -> None:
        driver = _bindings()
        self._shared, self._threads = shared, warps * 32
        self._module = _call("cuModuleLoadData", cubin)
        with ExitStack() as on_failure:
            on_failure.callback(self.unload)
            self._function = _call("cuModuleGetFunction", self._module, name.encode())
            if shared > _STATIC_SHARED_LIMIT:
                most = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                _call("cuFuncSetAttribute", self._function, most, shared)
            on_failure.pop_all()

    def launch(self, grid: Sequence[int], stream: int, arguments: Sequence[Argument]) -> None:
        """Launch ``grid`` blocks, up to three sizes, on ``stream``. Raises `DriverError`."""
        blocks = (*grid, 1, 1)[:3]
        values = tuple(value for value, _ in arguments), tuple(kind for _, kind in arguments)
        _call("cuLaunchKernel", self._function, *blocks, self._threads, 1, 1, self._shared, stream, values, 0)

    def unload(self) -> None:
        """Give the module's memory back; no graph that holds the kernel may be replayed afterwards."""
        _call("cuModuleUnload", self._module)


SCRATCH: tuple[Argument, Argument] = ((0, ctypes.c_void_p), (0, ctypes.c_void_p))
"""The last two arguments of every kernel that Triton compiled: scratch memory that ours do not use."""


@dataclass(frozen=True, slots=True)
class Node:
    """A node of a graph: what it is (``KERNEL``, ``MEMCPY``, ``MEMSET``, …) and, of a kernel, its name."""

    kind: str
    kernel: str | None


def graph_nodes(graph: int) -> list[Node]:
    """The nodes of a ``cudaGraph_t``, in no promised order. Raises `DriverError`."""
    driver = _bindings()
    handle = driver.CUgraph(graph)
    _, count = _call("cuGraphGetNodes", handle, 0)
    nodes, _ = _call("cuGraphGetNodes", handle, count)
    return [_node(node) for node in nodes[:count]]


def _node(node: Any) -> Node:
    kind = _call("cuGraphNodeGetType", node).name.removeprefix("CU_GRAPH_NODE_TYPE_")
    if kind != "KERNEL":
        return Node(kind, None)
    parameters = _call("cuGraphKernelNodeGetParams", node)
    # A kernel of a library comes as CUkernel, one of a module as CUfunction; the other handle is null.
    if int(parameters.func):
        name = _call("cuFuncGetName", parameters.func)
    else:
        name = _call("cuKernelGetName", parameters.kern)
    return Node(kind, name.decode())


def upload(graph_exec: int, stream: int) -> None:
    """Have an instantiated graph (``cudaGraphExec_t``) on the device before its first launch. Raises `DriverError`."""
    driver = _bindings()
    _call("cuGraphUpload", driver.CUgraphExec(graph_exec), driver.CUstream(stream))


def write_dot(graph: int, path: Path) -> None:
    """Write a ``cudaGraph_t``, all that is known of its nodes, as a dot file. Raises `DriverError`."""
    driver = _bindings()
    verbose = driver.CUgraphDebugDot_flags.CU_GRAPH_DEBUG_DOT_FLAGS_VERBOSE
    _call("cuGraphDebugDotPrint", driver.CUgraph(graph), str(path).encode(), int(verbose))
