"""Pages that left the device for a while, kept in host memory under a key.

Moves are accepted in the order of submission and run in the same order, perhaps later and on another thread:
`accept` works on a ledger of what earlier moves will leave, `run` on the memory itself. A page is kept whole,
in all pools: what lies in its unused tail comes back as it was.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from torch import Tensor

from wavegraph.capture.device import Device
from wavegraph.errors import CaptureError
from wavegraph.model.io import Pools

Moves = Sequence[tuple[int, Sequence[int]]]
"""Key and pages of each entry that moves."""


@dataclass(frozen=True, slots=True)
class SwapStats:
    """Entries, pages and bytes on the host once all accepted moves have run, and pages moved since start-up."""

    keys: int
    pages: int
    bytes: int
    pages_out: int
    pages_in: int


class PageStore:
    """Host copies of pages of ``pools`` by key. The last page of the pools is scratch and never moves."""

    def __init__(self, pools: Pools, device: Device) -> None:
        self._device = device
        self._pools: dict[str, Tensor] = {entry.name: getattr(pools, entry.name) for entry in fields(pools)}
        self._num_pages = len(pools.hidden) - 1
        self._page_bytes = sum(pool[0].numel() * pool.element_size() for pool in self._pools.values())
        self._ledger: dict[int, int] = {}
        self._copies: dict[int, dict[str, Tensor]] = {}
        self._pages_out = 0
        self._pages_in = 0

    def accept(self, out: Moves, back: Moves, drop: Sequence[int]) -> None:
        """Check and note moves, in this order: ``out`` to the host, ``back`` to the pools, ``drop`` to nowhere.

        Raises `CaptureError`, noting nothing, for a page that is not one, a key that is stored twice or is not
        there, and pages that are fewer or more than were stored. Keys to drop may be missing.
        """
        if not (out or back or drop):
            return
        ledger = dict(self._ledger)
        for key, pages in out:
            self._check_pages("swap_out", key, pages)
            if key in ledger:
                raise CaptureError(f"swap_out: key {key} is on the host already; bring it back or drop it first")
            ledger[key] = len(pages)
        taken: set[int] = set()
        for key, pages in back:
            self._check_pages("swap_in", key, pages)
            if key not in ledger:
                raise CaptureError(f"swap_in: key {key} is not on the host; swap it out or put it there first")
            if len(pages) != ledger[key]:
                raise CaptureError(f"swap_in: key {key} has {ledger[key]} pages on the host, not {len(pages)}")
            if len(taken.union(pages)) != len(taken) + len(pages):
                raise CaptureError(f"swap_in: key {key} is to fill a page twice; give every entry pages of its own")
            taken.update(pages)
            del ledger[key]
        for key in drop:
            ledger.pop(key, None)
        self._ledger = ledger
        self._pages_out += sum(len(pages) for _, pages in out)
        self._pages_in += len(taken)

    def run(self, out: Moves, back: Moves, drop: Sequence[int]) -> None:
        """Carry out moves that were accepted, or submit them in the device's order.

        Page by page: a page lies in one piece, and no more memory is wanted on the device.
        """
        for key, pages in out:
            copies = self._copies[key] = {}
            for name, pool in self._pools.items():
                copies[name] = self._device.host(len(pages), *pool.shape[1:], dtype=pool.dtype)
                for place, page in zip(copies[name], pages, strict=True):
                    place.copy_(pool[page], non_blocking=True)
        for key, pages in back:
            copies = self._copies.pop(key)
            for name, pool in self._pools.items():
                for place, page in zip(copies[name], pages, strict=True):
                    pool[page].copy_(place, non_blocking=True)
        for key in drop:
            self._copies.pop(key, None)

    def take(self, key: int) -> dict[str, Tensor]:
        """Hand over what is stored under ``key``, by pool, ``[pages, …]`` as in the pools; it is stored no longer.

        All accepted moves must have run. Raises `CaptureError` if the key is not on the host.
        """
        if key not in self._ledger:
            raise CaptureError(f"key {key}: is not on the host; swap it out first")
        del self._ledger[key]
        return self._copies.pop(key)

    def put(self, key: int, tensors: Mapping[str, Tensor]) -> None:
        """Store what `take` of an equal pool gave. The tensors are kept, not copied: leave them as they are.

        Raises `CaptureError`, storing nothing, if the key is in use or a tensor does not fit its pool.
        """
        if key in self._ledger:
            raise CaptureError(f"key {key}: is on the host already; bring it back or drop it first")
        if tensors.keys() != self._pools.keys():
            raise CaptureError(f"key {key}: has tensors {sorted(tensors)}; the pools are {sorted(self._pools)}")
        count = len(tensors["hidden"]) if tensors["hidden"].dim() else 0
        for name, pool in self._pools.items():
            wanted = (count, *pool.shape[1:])
            tensor = tensors[name]
            if tensor.dtype != pool.dtype or tuple(tensor.shape) != wanted or tensor.device.type != "cpu":
                raise CaptureError(
                    f"key {key}: {name} is {list(tensor.shape)} {tensor.dtype} on {tensor.device}, but the pool takes "
                    f"{list(wanted)} {pool.dtype} from cpu; export it from an engine of the same model and page size"
                )
        self._ledger[key] = count
        self._copies[key] = dict(tensors)

    @property
    def stats(self) -> SwapStats:
        """What is stored, and what has moved."""
        pages = sum(self._ledger.values())
        return SwapStats(len(self._ledger), pages, pages * self._page_bytes, self._pages_out, self._pages_in)

    def _check_pages(self, move: str, key: int, pages: Sequence[int]) -> None:
        for page in pages:
            if not 0 <= page < self._num_pages:
                raise CaptureError(f"{move}: page {page} of key {key} is outside 0..{self._num_pages - 1}")
