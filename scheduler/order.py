"""In which order ready rows are taken. An order holds lanes that have a ready row, each at most once."""

from collections import deque
from typing import Protocol

from wavegraph.scheduler.request import Lane, Request


class Order(Protocol):
    """What `Scheduler` asks of an order."""

    def ready(self, lane: Lane) -> None:
        """A submitted step has left ``lane`` with ready rows, perhaps; queue it unless it is queued."""
        ...

    def take(self, budget: int, chunk: int) -> list[tuple[Lane, int]]:
        """Lanes and row counts of the next step: at most ``budget`` rows, at most ``chunk`` of one lane."""
        ...


class FifoOrder:
    """The RFC's FIFO of ready tasks, over all requests, chunks and depths.

    A lane is queued when a finished predecessor makes a row of it ready, and served in that order. When the
    budget cuts a lane's turn short, it keeps its place at the head for the rest of that turn. A turn is at most
    ``chunk`` rows and each lane is queued once, so a lane waits at most ``ceil(lanes * chunk / budget)`` steps.
    """

    def __init__(self) -> None:
        self._queue: deque[Lane] = deque()

    def ready(self, lane: Lane) -> None:
        """Queue ``lane`` at the tail."""
        if not lane.queued and lane.next < lane.limit:
            lane.queued = True
            self._queue.append(lane)

    def take(self, budget: int, chunk: int) -> list[tuple[Lane, int]]:
        """Serve lanes from the head until the budget is full; entries of ended requests are dropped."""
        queue = self._queue
        taken: list[tuple[Lane, int]] = []
        while queue and budget:
            lane = queue.popleft()
            if lane.request.ended:
                continue
            wanted = min(lane.turn or chunk, lane.limit - lane.next)
            count = min(wanted, budget)
            budget -= count
            taken.append((lane, count))
            lane.turn = wanted - count
            if lane.turn:
                queue.appendleft(lane)
            else:
                lane.queued = False
        return taken


class OrdinaryOrder:
    """Ordinary chunked prefill (RFC: ``wavefront_prefill=False``): an atomic plan of all depths.

    A cohort is chosen once, of prompt chunks alone or of decode rows alone, whichever kind has waited longest,
    and its depths 0 .. D-1 are handed out back to back, with no scheduling inside.
    """

    def __init__(self, depths: int) -> None:
        self._depths = depths
        self._cohort: list[tuple[Request, int]] = []
        self._depth = depths - 1
        self._queues: tuple[deque[tuple[int, Lane]], deque[tuple[int, Lane]]] = (deque(), deque())
        self._arrivals = 0

    def ready(self, lane: Lane) -> None:
        """Queue a request's next chunk or decode row; depths above 0 follow their cohort by themselves."""
        if lane.depth == 0 and not lane.queued and lane.next < lane.limit:
            lane.queued = True
            self._arrivals += 1
            decode = lane.next >= lane.request.num_prompt_tokens
            self._queues[decode].append((self._arrivals, lane))

    def take(self, budget: int, chunk: int) -> list[tuple[Lane, int]]:
        """The running cohort's next depth, without members that ended; else depth 0 of a new cohort."""
        if self._depth + 1 < self._depths:
            self._depth += 1
            self._cohort = [member for member in self._cohort if not member[0].ended]
            if self._cohort:
                return [(request.lanes[self._depth], count) for request, count in self._cohort]
        queue = self._oldest_queue()
        taken: list[tuple[Lane, int]] = []
        while queue and budget:
            lane = queue.popleft()[1]
            if lane.request.ended:
                continue
            lane.queued = False
            count = min(chunk, lane.limit - lane.next, budget)
            budget -= count
            taken.append((lane, count))
        self._cohort = [(lane.request, count) for lane, count in taken]
        self._depth = 0 if taken else self._depths - 1
        return taken

    def _oldest_queue(self) -> deque[tuple[int, Lane]]:
        for queue in self._queues:
            while queue and queue[0][1].request.ended:
                queue.popleft()
        prompts, decodes = self._queues
        if prompts and decodes:
            return prompts if prompts[0][0] < decodes[0][0] else decodes
        return prompts or decodes
