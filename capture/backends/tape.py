"""Listening to a program: every operator it calls, over which storages, and what no recording can hold.

The rules are those of a CUDA graph, found without a GPU: no value may reach the host, no shape may depend on
data, every tensor must be static or made by the program itself, and nothing made may outlive the program.
"""

import gc
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from wavegraph.capture.static import StaticSet
from wavegraph.errors import CaptureError

_Weak: Any = StorageWeakRef  # it has no type hints

# Frames of torch and of the capture room are not where a program went wrong.
_OWN_FRAMES = tuple(str(folder) + os.sep for folder in (Path(torch.__file__).parent, Path(__file__).parent.parent))

# Calls that hand a tensor's content or address to the host. On a CPU most reach no operator, so they are
# caught as functions.
_HOST_CALLS: dict[Any, str] = {
    getattr(Tensor, name): name
    for name in (
        "item", "tolist", "numpy", "cpu", "data_ptr", "__repr__", "__format__", "__array__", "__dlpack__",
        "__bool__", "__int__", "__float__", "__complex__", "__index__", "__contains__",
    )
}  # fmt: skip

_SYNC_TAG = torch.Tag.data_dependent_output
_SHAPE_TAG = torch.Tag.dynamic_output_shape
_RANDOM_TAG = torch.Tag.nondeterministic_seeded
_METADATA_TAG = torch.Tag.inplace_view

# Tagged as having a shape that depends on data, or hiding one, but only under a boolean mask.
_INDEXING = {
    "aten::index", "aten::_unsafe_index", "aten::index_put", "aten::index_put_", "aten::_unsafe_index_put",
    "aten::_index_put_impl_",
}  # fmt: skip
_RESIZING = {"aten::resize_", "aten::resize_as_", "aten::set_"}
_UNINITIALISED = {
    "aten::empty", "aten::empty_like", "aten::new_empty", "aten::empty_strided", "aten::new_empty_strided",
    "aten::empty_permuted",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A tensor as a place: number of its storage in the tape, and geometry in elements."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(slots=True)
class StorageUse:
    """A storage seen while recording: static ones are held, others lived from call ``first`` to ``last``.

    ``origin`` is the name of a static tensor, or the operator and source line that made the storage.
    """

    origin: str
    nbytes: int
    static: torch.UntypedStorage | None
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Call:
    """One operator call. Tensors are `TensorRef`; ``outputs`` holds those it made, None for other results."""

    op: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[TensorRef | None, ...]


@dataclass(frozen=True, slots=True)
class Tape:
    """All calls of a program in order, and every storage they touch."""

    calls: tuple[Call, ...]
    storages: tuple[StorageUse, ...]


def record(program: Callable[[], object], static: StaticSet, name: str) -> Tape:
    """Run ``program`` once and return what it did.

    Raises `CaptureError` naming ``name``, the operator and the source line for anything no recording can
    hold, also if the program swallows the first error.
    """
    recorder = _Recorder(static, name)
    with _HostCalls(recorder), recorder:
        program()
    if recorder.failure is not None:
        raise recorder.failure
    recorder.check_nothing_escaped()
    return Tape(tuple(recorder.calls), tuple(recorder.uses))


class _HostCalls(TorchFunctionMode):
    """Refuses calls that read a tensor on the host."""

    def __init__(self, recorder: "_Recorder") -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        call = _HOST_CALLS.get(func)
        if call is not None:
            self._recorder.fail(f"Tensor.{call}", "hands a tensor to the host, which a replay cannot wait for")
        return func(*args, **(kwargs or {}))


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Checks and notes each operator call, then lets it run.

    Tensors are noted as places, not kept, so that memory comes and goes as it does without recording.
    Storages are known by their address in the runtime; a weak reference to each keeps that address from being
    given to another.
    """

    def __init__(self, static: StaticSet, name: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Call] = []
        self.uses: list[StorageUse] = []
        self.failure: CaptureError | None = None
        self._name = name
        self._weak: list[Any] = []
        self._number: dict[int, int] = {}
        for origin, storage in static.storages.items():
            self._add(storage, origin, storage)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: to be skipped, a mode imports the whole compiler at its first operator, which takes seconds."""
        return False

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        self._check(func, name, args, kwargs)
        frozen_args = tuple(self._freeze(func, value) for value in args)
        frozen_kwargs = {key: self._freeze(func, value) for key, value in kwargs.items()}
        result = func(*args, **kwargs)
        known = len(self.uses)
        outputs = tuple(self._output(func, value, known) for value in _tensors(result))
        made = len(self.uses) > known
        if func._schema.is_mutable:
            self._check_sizes(func, (*args, *kwargs.values()))
        # A call that neither makes, changes nor asserts anything is a view; its users carry its geometry.
        works = made or func._schema.is_mutable or not func._schema.returns
        if works and name not in _UNINITIALISED and _METADATA_TAG not in func.tags:
            call = Call(func, frozen_args, frozen_kwargs, outputs)
            for ref in _refs(call):
                self.uses[ref.storage].last = len(self.calls)
            self.calls.append(call)
        return result

    def fail(self, operator: object, reason: str) -> None:
        """Raise, and remember the first reason: the program may catch the exception."""
        error = CaptureError(f"{self._name}: {operator} at {_source_line()} {reason}")
        self.failure = self.failure or error
        raise error

    def check_nothing_escaped(self) -> None:
        """Raise `CaptureError` for a tensor that the program made and that something still holds."""
        alive = self._alive()
        if alive is None:
            return
        gc.collect()
        alive = self._alive()
        if alive is not None:
            raise CaptureError(
                f"{self._name}: a tensor made by {alive.origin} outlives the recording, but replays "
                "reuse its memory; copy it into a static tensor, or make it before"
            )

    def _alive(self) -> StorageUse | None:
        pairs = zip(self.uses, self._weak, strict=True)
        return next((use for use, weak in pairs if use.static is None and not weak.expired()), None)

    def _check(self, func: OpOverload, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        tags = func.tags
        if _SYNC_TAG in tags:
            self.fail(func, "reads a value on the host, which a replay cannot wait for")
        if _RANDOM_TAG in tags:
            self.fail(func, "draws random numbers, which every replay would repeat; pass noise in a static tensor")
        if name in _RESIZING:
            self.fail(func, "moves or resizes storage; allocate it at its largest size before")
        if name in _INDEXING:
            if any(t.dtype in (torch.bool, torch.uint8) for t in _tensors(args[1])):
                self.fail(func, "selects by a boolean mask, so its shape depends on data; use torch.where")
        elif _SHAPE_TAG in tags and kwargs.get("output_size") is None:
            self.fail(func, "has an output shape that depends on data; compute at the full static shape and mask")

    def _check_sizes(self, func: OpOverload, values: Sequence[Any]) -> None:
        for tensor in _tensors(values):
            storage = tensor.untyped_storage()
            use = self.uses[self._number[_key(storage)]]
            if storage.nbytes() != use.nbytes:
                self.fail(
                    func,
                    f"resized storage of {use.origin} from {use.nbytes} to {storage.nbytes()} bytes; allocate it whole",
                )

    def _freeze(self, func: OpOverload, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._known(func, value)
        if isinstance(value, (list, tuple)):
            return [self._freeze(func, item) for item in value]
        return value

    def _known(self, func: OpOverload, tensor: Tensor) -> TensorRef:
        if tensor.layout is not torch.strided:
            self.fail(func, f"uses layout {tensor.layout}, which has no address to hold; use a strided tensor")
        number = self._number.get(_key(tensor.untyped_storage()))
        if number is None:
            self.fail(
                func,
                f"reads a tensor {list(tensor.shape)} of {tensor.dtype} that is neither static nor made by "
                "the program (host data, as in torch.tensor, is the same in all replays); declare it static",
            )
        assert number is not None
        return _ref(number, tensor)

    def _output(self, func: OpOverload, tensor: Tensor, known: int) -> TensorRef | None:
        """The place of an output whose storage the call made; None if it is one of the first ``known``."""
        storage = tensor.untyped_storage()
        number = self._number.get(_key(storage))
        if number is None:
            number = self._add(storage, f"{func} at {_source_line()}", None)
        return _ref(number, tensor) if number >= known else None

    def _add(self, storage: torch.UntypedStorage, origin: str, static: torch.UntypedStorage | None) -> int:
        weak = _Weak(storage)
        number, now = len(self.uses), len(self.calls)
        self.uses.append(StorageUse(origin, storage.nbytes(), static, first=now, last=now))
        self._weak.append(weak)
        self._number[weak.cdata] = number
        return number


def _key(storage: torch.UntypedStorage) -> int:
    """The runtime's own address of a storage: the same for all tensors on it."""
    key: int = _Weak(storage).cdata
    return key


def _ref(number: int, tensor: Tensor) -> TensorRef:
    return TensorRef(number, tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset()))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _refs(call: Call) -> Iterator[TensorRef]:
    pending: list[Any] = [*call.args, *call.kwargs.values(), *call.outputs]
    while pending:
        value = pending.pop()
        if isinstance(value, TensorRef):
            yield value
        elif isinstance(value, list):
            pending.extend(value)


def _source_line() -> str:
    """``file:line`` of the innermost frame that is neither torch's nor this room's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(_OWN_FRAMES):
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return "an unknown line"
