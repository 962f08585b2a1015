"""Page allocation: which page belongs to whom. Counts and ids only; the storage is elsewhere."""

from wavegraph.errors import EngineError


class PageAllocator:
    """Free list over page ids ``0 .. num_pages - 1``, with reservations.

    A reservation is a promise that later `take` calls will succeed; it names no page yet. Admission reserves
    a request's worst case, so no running request can meet an empty pool. Misuse (taking without a reservation,
    freeing twice) raises `EngineError`: it would mean that two requests share a page.
    """

    __slots__ = ("_free", "_owned", "num_pages", "reserved")

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.reserved = 0
        self._free = list(range(num_pages - 1, -1, -1))
        self._owned = bytearray(num_pages)

    @property
    def num_free(self) -> int:
        """Pages that nobody holds, reserved or not."""
        return len(self._free)

    @property
    def available(self) -> int:
        """Pages that can still be reserved."""
        return len(self._free) - self.reserved

    def reserve(self, count: int) -> bool:
        """Promise ``count`` pages; False, and no change, if that many are not available."""
        if count > self.available:
            return False
        self.reserved += count
        return True

    def unreserve(self, count: int) -> None:
        """Give back ``count`` promised pages that were never taken."""
        if count > self.reserved:
            raise EngineError(f"pages: {count} reservations returned but only {self.reserved} are out")
        self.reserved -= count

    def take(self) -> int:
        """Turn one reservation into a page."""
        if self.reserved < 1:
            raise EngineError("pages: a page was taken without a reservation")
        self.reserved -= 1
        page = self._free.pop()
        self._owned[page] = 1
        return page

    def free(self, pages: list[int]) -> None:
        """Return pages. They may be handed out again at once: device work is ordered by submission."""
        for page in pages:
            if not self._owned[page]:
                raise EngineError(f"pages: page {page} was freed twice")
            self._owned[page] = 0
            self._free.append(page)
