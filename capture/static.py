"""The tensors that recorded programs may read and write: allocated once, named, and never moved."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass

import torch
from torch import Tensor

from wavegraph.errors import CaptureError


@dataclass(frozen=True, slots=True)
class _Watched:
    """One static tensor and where it lay when it was declared. The bound methods make checking cheap."""

    name: str
    address: int
    nbytes: int
    address_now: Callable[[], int]
    nbytes_now: Callable[[], int]


class StaticSet:
    """Static tensors by name. A capture holds their addresses, so each replay first calls `check`.

    Tensors may share storage (the step's inputs are views of one buffer); a storage is named by the first
    tensor declared on it.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.storages: dict[str, torch.UntypedStorage] = {}
        self._watched: list[_Watched] = []
        # The tensors themselves are kept too: their storages must stay alive and their addresses their own.
        self._tensors = dict(tensors)
        seen: set[int] = set()
        for name, tensor in self._tensors.items():
            if tensor.layout is not torch.strided:
                raise CaptureError(f"{name}: layout {tensor.layout} has no address to hold; use a strided tensor")
            storage = tensor.untyped_storage()
            self._watched.append(_Watched(name, tensor.data_ptr(), storage.nbytes(), tensor.data_ptr, storage.nbytes))
            if storage.data_ptr() not in seen or storage.nbytes() == 0:
                seen.add(storage.data_ptr())
                self.storages[name] = storage

    @classmethod
    def of(cls, **roots: object) -> "StaticSet":
        """All tensors found in the given dataclasses, mappings, sequences and objects of this project."""
        tensors: dict[str, Tensor] = {}
        seen: set[int] = set()
        for name, root in roots.items():
            tensors.update(_walk(name, root, seen))
        return cls(tensors)

    def check(self) -> None:
        """Raise `CaptureError` naming the first tensor that moved, or whose storage changed size."""
        for watched in self._watched:
            if watched.nbytes_now() != watched.nbytes:
                raise CaptureError(
                    f"{watched.name}: its storage changed from {watched.nbytes} to {watched.nbytes_now()} "
                    "bytes after it was declared static; allocate it at its largest size, or capture again"
                )
            if watched.address_now() != watched.address:
                raise CaptureError(
                    f"{watched.name}: moved from address {watched.address:#x} to {watched.address_now():#x} "
                    "after it was declared static; change it in place (copy_), or capture again"
                )


def _walk(name: str, value: object, seen: set[int]) -> Iterator[tuple[str, Tensor]]:
    if id(value) in seen:
        return
    if isinstance(value, Tensor):
        seen.add(id(value))
        yield name, value
        return
    children: list[tuple[str, object]] = []
    if is_dataclass(value) and not isinstance(value, type):
        children = [(f"{name}.{f.name}", getattr(value, f.name)) for f in fields(value)]
    elif isinstance(value, Mapping):
        children = [(f"{name}[{key!r}]", item) for key, item in value.items()]
    elif isinstance(value, (list, tuple)):
        children = [(f"{name}[{index}]", item) for index, item in enumerate(value)]
    elif type(value).__module__.startswith("wavegraph.") and hasattr(value, "__dict__"):
        children = [(f"{name}.{key}", item) for key, item in vars(value).items()]
    if children:
        seen.add(id(value))
    for child_name, child in children:
        yield from _walk(child_name, child, seen)
