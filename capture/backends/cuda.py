"""The `cuda` backend: programs as CUDA graphs, captured into one shared memory pool on the device's own stream.

The rules of capture are CUDA's, and `recorded` keeps them on a CPU. What is added here: two runs before each capture,
so that what is made once (modules, workspaces, plans) is made outside; no garbage collection in between, which could
free memory inside a capture; and thread-local capture mode, so that another thread's call breaks nothing.
Graphs replayed in stream order may share memory, because no program leaves a result outside static tensors.
"""

import gc
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import cuda

from wavegraph.capture.backends.base import Backend, Program, Recording
from wavegraph.capture.device import CudaDevice
from wavegraph.capture.static import StaticSet
from wavegraph.errors import CaptureError
from wavegraph.model import cuda_driver
from wavegraph.model.cuda_driver import Node

WARM_UPS = 2
CAPTURE_MODE = "thread_local"


class CudaBackend(Backend):
    """Captures and replays CUDA graphs, known by the names of their captures. Needs a GPU and cuda-python.

    A capture that fails takes all graphs of the backend with it: they share the pool.
    """

    name = "cuda"

    def __init__(self, device: CudaDevice | None = None) -> None:
        self._gpu = device if device is not None else CudaDevice()
        super().__init__(self._gpu)
        self._pool = cuda.graph_pool_handle()
        self._graphs: dict[str, Any] = {}  # `torch.cuda.CUDAGraph`, which has no full type hints

    @contextmanager
    def session(self) -> Iterator[None]:
        """All captures of a start-up: what other streams did has ended, and the garbage collector rests."""
        with super().session(), _collector_at_rest():
            yield
        self._gpu.settle()

    def release(self) -> None:
        """Destroy all graphs, and give the pool's memory back to the driver."""
        self._gpu.synchronize()
        graphs, self._graphs = self._graphs, {}
        for graph in graphs.values():
            graph.reset()
        self._gpu.settle()

    def nodes(self, name: str) -> list[Node]:
        """The nodes of the graph ``name``: their kinds, and the names of its kernels."""
        return cuda_driver.graph_nodes(self._graphs[name].raw_cuda_graph())

    def write_dot(self, name: str, path: Path) -> None:
        """Write the graph ``name`` to ``path`` for Graphviz."""
        cuda_driver.write_dot(self._graphs[name].raw_cuda_graph(), path)

    def _record(self, program: Program, static: StaticSet, name: str) -> Recording:
        graph = cuda.CUDAGraph(keep_graph=True)
        with ExitStack() as on_failure:
            on_failure.callback(self._abandon, graph)
            try:
                for _ in range(WARM_UPS):
                    program()
                self._gpu.synchronize()
                before = self._gpu.memory().free
                graph.capture_begin(pool=self._pool, capture_error_mode=CAPTURE_MODE)
                program()
                graph.capture_end()
                graph.instantiate()
                cuda_driver.upload(graph.raw_cuda_graph_exec(), self._gpu.stream.cuda_stream)
                self._gpu.synchronize()
                nodes = len(cuda_driver.graph_nodes(graph.raw_cuda_graph()))
                taken = before - self._gpu.memory().free
            except RuntimeError as error:
                reason = str(error).strip().split("\n")[0]
                raise CaptureError(f"{name}: cannot be captured as a CUDA graph ({reason})") from error
            on_failure.pop_all()
        self._graphs[name] = graph
        return Recording(graph.replay, nodes, max(0, taken))

    def _abandon(self, graph: Any) -> None:
        """End what a failed capture left open, so that neither stream nor memory stays in its hands.

        When the driver has invalidated a capture, torch up to 2.13 ends neither the routing of allocations to the pool
        nor the reference to it (pytorch/pytorch #180395, #190348).
        """
        with suppress(RuntimeError):  # it was not begun, or has ended, or says again that it is invalid
            graph.capture_end()
        with suppress(RuntimeError):  # nothing is routed any more
            torch._C._cuda_endAllocateToPool(self._gpu.index, self._pool)
        with suppress(RuntimeError):  # the device is lost: the first error says so
            graph.reset()
            self.release()
            segments = cuda.memory_snapshot()  # type: ignore[no-untyped-call]
            if any(tuple(segment["segment_pool_id"]) == tuple(self._pool) for segment in segments):
                torch._C._cuda_releasePool(self._gpu.index, self._pool)
                self._gpu.settle()


@contextmanager
def _collector_at_rest() -> Iterator[None]:
    """Collect garbage now and none within; what is alive now is not looked at again until the end."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        if enabled:
            gc.enable()
