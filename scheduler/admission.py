"""Who is admitted next: the queue of requests that wait for a slot and pages."""

import heapq
from dataclasses import dataclass
from typing import Protocol

from wavegraph.scheduler.request import Request


class Ranking(Protocol):
    """Total order of requests; a lower rank is more important. It never changes in a request's life."""

    def rank(self, request: Request) -> tuple[int, int]:
        """The request's place in the order."""
        ...


@dataclass(frozen=True, slots=True)
class Fcfs:
    """First come, first served, whatever the priority."""

    def rank(self, request: Request) -> tuple[int, int]:
        """Arrival."""
        return request.arrival, 0


@dataclass(frozen=True, slots=True)
class Priority:
    """A level of priority is worth ``arrivals_per_level`` arrivals.

    So a request can be overtaken by at most ``arrivals_per_level`` later ones for each level that they are above
    it, and none waits for ever.
    """

    arrivals_per_level: int = 1000

    def rank(self, request: Request) -> tuple[int, int]:
        """Arrival, moved by the priority."""
        return request.arrival + request.spec.priority * self.arrivals_per_level, request.arrival


class WaitingQueue:
    """Waiting requests by rank, with removal by id. Push, pop and removal cost O(log n)."""

    def __init__(self, ranking: Ranking) -> None:
        self._ranking = ranking
        self._heap: list[tuple[tuple[int, int], int, Request]] = []
        self._entries: dict[str, tuple[int, Request]] = {}
        self._pushes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, request_id: str) -> Request | None:
        """The waiting request of that id."""
        entry = self._entries.get(request_id)
        return entry[1] if entry else None

    def push(self, request: Request) -> None:
        """Add a request at its rank."""
        self._pushes += 1
        self._entries[request.spec.request_id] = self._pushes, request
        heapq.heappush(self._heap, (self._ranking.rank(request), self._pushes, request))

    def remove(self, request: Request) -> None:
        """Take a request out, wherever it stands; its heap entry is dropped when it surfaces."""
        del self._entries[request.spec.request_id]

    def first(self, count: int) -> list[Request]:
        """The ``count`` most important waiting requests, most important first."""
        heap = self._heap
        kept: list[tuple[tuple[int, int], int, Request]] = []
        while heap and len(kept) < count:
            entry = heapq.heappop(heap)
            if self._entries.get(entry[2].spec.request_id) == (entry[1], entry[2]):
                kept.append(entry)
        for entry in kept:
            heapq.heappush(heap, entry)
        return [entry[2] for entry in kept]
