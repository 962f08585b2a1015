"""Page allocation: which page belongs to whom, and which free page still holds a known prefix.

Counts and ids only; the storage is elsewhere.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b

from wavegraph.errors import EngineError

PrefixKey = bytes
"""Digest of all tokens up to and including a page's last; equal keys mean equal KV and hidden rows."""


def prefix_key(before: PrefixKey, tokens: Sequence[int]) -> PrefixKey:
    """Key of the page that holds ``tokens`` after the prefix ``before`` (empty for a first page)."""
    return blake2b(before + array("q", tokens).tobytes(), digest_size=16).digest()


class PagePool:
    """Reference-counted pages ``0 .. num_pages - 1``, with reservations and a prefix index.

    A page is *free* (nobody holds it, its content is worthless), *cached* (nobody holds it, but its content is a
    published prefix; it is reused least recently used first), or *held* by one or more requests. A reservation
    is a promise that later `take` calls will succeed; it names no page yet. Misuse (taking without a
    reservation, releasing twice) raises `EngineError`: it would mean that two requests share a page unknowingly.
    """

    __slots__ = ("_by_key", "_cached", "_free", "_holders", "_key_of", "num_pages", "reserved")

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.reserved = 0
        self._free = list(range(num_pages - 1, -1, -1))
        self._holders = [0] * num_pages
        self._by_key: dict[PrefixKey, int] = {}
        self._key_of: dict[int, PrefixKey] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        """Pages that nobody holds, cached ones included, reserved or not."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Pages that nobody holds and that hold a published prefix."""
        return len(self._cached)

    @property
    def available(self) -> int:
        """Pages that can still be reserved."""
        return self.num_free - self.reserved

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
        """Turn one reservation into a page, evicting the least recently used prefix if no page is free."""
        if self.reserved < 1:
            raise EngineError("pages: a page was taken without a reservation")
        self.reserved -= 1
        if self._free:
            page = self._free.pop()
        else:
            page, _ = self._cached.popitem(last=False)
            self._forget(page)
        self._holders[page] = 1
        return page

    def release(self, pages: Iterable[int]) -> None:
        """Let go of pages. They may be handed out again at once: device work is ordered by submission.

        Published pages whose last holder leaves stay cached; give a request's pages last block first, so that
        a prefix's tail is evicted before its head.
        """
        for page in pages:
            if self._holders[page] < 1:
                raise EngineError(f"pages: page {page} was released by someone who does not hold it")
            self._holders[page] -= 1
            if self._holders[page]:
                continue
            if page in self._key_of:
                self._cached[page] = None
            else:
                self._free.append(page)

    # -- prefixes ------------------------------------------------------------------------------------------

    def publish(self, key: PrefixKey, page: int) -> None:
        """Say that a held page holds the finished prefix ``key``; the first page to say so stays the one."""
        if key not in self._by_key and page not in self._key_of:
            self._by_key[key] = page
            self._key_of[page] = key

    def lookup(self, key: PrefixKey) -> int | None:
        """The page that holds a prefix, without holding it."""
        return self._by_key.get(key)

    def reserve_with(self, shared: list[int], count: int) -> bool:
        """Hold the ``shared`` pages and promise ``count`` more, or do neither and return False."""
        idle = sum(1 for page in shared if not self._holders[page])
        if idle + count > self.available:
            return False
        for page in shared:
            if not self._holders[page]:
                del self._cached[page]
            self._holders[page] += 1
        self.reserved += count
        return True

    def forget_prefixes(self) -> None:
        """Drop every published prefix, as when the weights change. Held pages stay held."""
        self._free.extend(self._cached)
        self._cached.clear()
        self._by_key.clear()
        self._key_of.clear()

    def _forget(self, page: int) -> None:
        del self._by_key[self._key_of.pop(page)]
