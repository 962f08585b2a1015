"""A thin fake of `torch.cuda` and of cuda-python, over CPU tensors: what is called, in what order, and when it runs.

As on a GPU, what is submitted to a stream waits in a queue: copies, fills and replays run when something waits for
them, so whatever the host reads or overwrites too early is seen in results. A graph replays the operators that ran
between the beginning and the end of its capture, on the same tensors. Memory is one number that graphs take from.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from wavegraph.capture import device
from wavegraph.capture.backends import cuda as backend
from wavegraph.capture.device import CudaDevice
from wavegraph.model import cuda_driver

TOTAL = 1 << 40
GRAPH_BYTES = 1 << 20
_WAITS = {"aten::copy_", "aten::fill_", "aten::zero_"}


class FakeCuda:
    """Stands for the module `torch.cuda`. ``log`` has the calls that matter by name; ``fail`` makes some of them fail.

    ``leaky`` is torch up to 2.13: a capture that the driver invalidated keeps its hand on the pool.
    """

    def __init__(self) -> None:
        self.log: list[str] = []
        self.fail: dict[str, Exception] = {}
        self.free = TOTAL
        self.leaky = False
        self.leaked = 0
        self.routed = False
        self.queue: deque[Callable[[], object]] = deque()
        self.capturing: FakeGraph | None = None
        self.graphs: list[FakeGraph] = []
        self.CUDAGraph = lambda keep_graph: FakeGraph(self, keep_graph)

    def note(self, name: str) -> None:
        self.log.append(name)
        if name in self.fail:
            raise self.fail[name]

    def run(self, upto: int | None = None) -> None:
        """Run what waits, or the first ``upto`` entries of it."""
        with _disable_current_modes():
            for _ in range(len(self.queue) if upto is None else upto):
                self.queue.popleft()()

    def Stream(self, index: int) -> "FakeStream":
        return FakeStream(self)

    def Event(self) -> "FakeEvent":
        return FakeEvent(self)

    @contextmanager
    def stream(self, stream: "FakeStream") -> Iterator[None]:
        with _Submitting(self):
            yield

    def graph_pool_handle(self) -> tuple[int, int]:
        self.note("pool")
        return (0, 7)

    def synchronize(self, index: int) -> None:
        self.note("synchronize")
        self.run()

    def empty_cache(self) -> None:
        self.note("empty_cache")

    def mem_get_info(self, index: int) -> tuple[int, int]:
        return self.free, TOTAL

    def get_device_properties(self, index: int) -> Any:
        return type("Properties", (), {"multi_processor_count": 132})

    def memory_snapshot(self) -> list[dict[str, object]]:
        held = self.leaked or any(graph.ended for graph in self.graphs)
        return [{"segment_pool_id": (0, 0)}] + [{"segment_pool_id": (0, 7)}] * bool(held)

    def end_allocate(self, index: int, pool: tuple[int, int]) -> None:
        self.note("end_allocate")
        if not self.routed:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.routed = False

    def release_pool(self, index: int, pool: tuple[int, int]) -> None:
        self.note("release_pool")
        assert self.leaked, "released twice"
        self.free += self.leaked
        self.leaked = 0


@dataclass
class FakeStream:
    cuda: FakeCuda
    cuda_stream: int = 99

    def synchronize(self) -> None:
        self.cuda.note("stream.synchronize")
        assert self.cuda.capturing is None, "a stream that is captured cannot be waited for"
        self.cuda.run()


class FakeEvent:
    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda
        self.passed = True

    def record(self) -> None:
        self.cuda.note("record")
        self.passed = False
        self.cuda.queue.append(self._pass)

    def _pass(self) -> None:
        self.passed = True

    def query(self) -> bool:
        self.cuda.note("query")
        return self.passed

    def synchronize(self) -> None:
        self.cuda.note("event.synchronize")
        while not self.passed:
            self.cuda.run(1)


class FakeGraph:
    def __init__(self, cuda: FakeCuda, keep_graph: bool) -> None:
        self.cuda, self.keep_graph = cuda, keep_graph
        self.calls: list[tuple[OpOverload, Sequence[Any], dict[str, Any], Any]] = []
        self.began = self.ended = self.ready = False
        cuda.graphs.append(self)

    def capture_begin(self, pool: tuple[int, int], capture_error_mode: str) -> None:
        assert self.cuda.capturing is None
        assert not self.cuda.queue, "work from before the capture is still in flight"
        self.cuda.note(f"begin {pool} {capture_error_mode}")
        self.cuda.capturing, self.cuda.routed, self.began = self, True, True

    def capture_end(self) -> None:
        self.cuda.note("end")
        if self.cuda.capturing is not self:
            raise RuntimeError("capture_end() called before capture_begin().")
        self.cuda.capturing = None
        if "invalidated" in self.cuda.fail:
            if self.cuda.leaky:
                self.cuda.leaked = GRAPH_BYTES
                self.cuda.free -= GRAPH_BYTES
            else:
                self.cuda.routed = False
            raise self.cuda.fail["invalidated"]
        self.cuda.routed, self.ended = False, True

    def instantiate(self) -> None:
        self.cuda.note("instantiate")
        assert self.ended
        assert self.keep_graph
        self.ready = True
        self.cuda.free -= GRAPH_BYTES

    def raw_cuda_graph(self) -> int:
        assert self.ended
        return id(self)

    def raw_cuda_graph_exec(self) -> int:
        assert self.ready
        return -id(self)

    def replay(self) -> None:
        assert self.ready, "a graph that was reset was replayed"
        self.cuda.note("replay")
        self.cuda.queue.append(self._run)

    def _run(self) -> None:
        assert self.ready
        for func, args, kwargs, results in self.calls:
            fresh = func(*args, **kwargs)
            for kept, new in zip(_tensors(results), _tensors(fresh), strict=True):
                if kept is not new:
                    kept.copy_(new)

    def reset(self) -> None:
        self.cuda.note("reset")
        if self.ready:
            self.cuda.free += GRAPH_BYTES
        self.ended = self.ready = False
        self.calls.clear()


class _Submitting(TorchDispatchMode):
    """Operators on a stream: recorded by a capture, or queued if they only write, or run behind all that waits."""

    def __init__(self, cuda: FakeCuda) -> None:
        super().__init__()
        self._cuda = cuda

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._cuda.capturing is not None:
            if torch.Tag.data_dependent_output in func.tags:
                raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
            result = func(*args, **kwargs)
            self._cuda.capturing.calls.append((func, args, kwargs, result))
            return result
        if func._schema.name in _WAITS:
            self._cuda.queue.append(lambda: func(*args, **kwargs))
            return args[0]
        if not func.is_view:
            self._cuda.run()
        return func(*args, **kwargs)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


class FakeDevice(CudaDevice):
    """A `CudaDevice` whose memory is the host's."""

    def __init__(self) -> None:
        super().__init__()
        self.target = torch.device("cpu")

    def host(self, *size: int, dtype: torch.dtype) -> Tensor:
        return torch.full(size, 77, dtype=dtype)


@dataclass
class FakeBindings:
    """Stands for `cuda.bindings.driver`: functions answer with a status and what they return."""

    cuda: FakeCuda
    names: dict[int, bytes] = field(default_factory=dict)

    def cuGraphGetNodes(self, graph: int, count: int) -> tuple[Any, ...]:
        calls = next(each for each in self.cuda.graphs if id(each) == graph).calls
        return 0, [_FakeNode(call[0]) for call in calls][:count], len(calls)

    def cuGraphNodeGetType(self, node: "_FakeNode") -> tuple[Any, ...]:
        return 0, type("Kind", (), {"name": "CU_GRAPH_NODE_TYPE_KERNEL"})

    def cuGraphKernelNodeGetParams(self, node: "_FakeNode") -> tuple[Any, ...]:
        self.names[id(node.op)] = node.op._schema.name.encode()
        return 0, type("Params", (), {"func": id(node.op), "kern": 0})

    def cuFuncGetName(self, function: int) -> tuple[Any, ...]:
        return 0, self.names[function]

    def cuGraphUpload(self, graph_exec: int, stream: int) -> tuple[int]:
        self.cuda.note(f"upload {stream}")
        assert any(-id(each) == graph_exec and each.ready for each in self.cuda.graphs)
        return (0,)

    def cuGraphDebugDotPrint(self, graph: int, path: bytes, flags: int) -> tuple[int]:
        with open(path, "w") as file:
            file.write(f"digraph {{ {len(self.cuGraphGetNodes(graph, 0))} }}")
        return (0,)

    class CUgraphDebugDot_flags:
        CU_GRAPH_DEBUG_DOT_FLAGS_VERBOSE = 1

    CUgraph = CUgraphExec = CUstream = staticmethod(lambda value: value)


@dataclass
class _FakeNode:
    op: OpOverload


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """`torch.cuda` and cuda-python, replaced wherever the backend uses them."""
    fake = FakeCuda()
    bindings = FakeBindings(fake)
    for module in (device, backend):
        monkeypatch.setattr(module, "cuda", fake)
    monkeypatch.setattr(cuda_driver, "_bindings", lambda: bindings)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", fake.end_allocate, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", fake.release_pool, raising=False)
    return fake
