"""Queues of ready lanes, and turns in them."""

from collections import deque
from collections.abc import Callable

from wavegraph.scheduler.request import Lane

Taken = list[tuple[Lane, int]]
"""Lanes of a step and their row counts."""

Allow = Callable[[Lane, int, Taken], int]
"""Asks for how many of ``count`` rows of a depth-0 lane the KV pool has room; it may make room, but not at the cost of
requests that the step has taken. Deeper rows have their pages."""


class LaneQueue:
    """Ready lanes of one kind, first come, first served.

    A lane is queued when a finished predecessor makes a row of it ready. When a step cuts a lane's turn short, it keeps
    its place at the head for the rest of that turn. A turn is at most ``turn`` rows and each lane is queued once, so a
    lane waits for at most ``ceil(lanes * turn / rows)`` steps that serve its queue with ``rows`` rows.
    ``waited`` counts the steps in a row that found the queue ready and ran nothing from it.
    """

    __slots__ = ("_lanes", "waited")

    def __init__(self) -> None:
        self._lanes: deque[Lane] = deque()  # by ascending arrival
        self.waited = 0

    def push(self, lane: Lane, arrival: int) -> None:
        """Queue a lane at the tail; ``arrival`` is larger than any before."""
        lane.queued = True
        lane.arrival = arrival
        self._lanes.append(lane)

    @property
    def oldest(self) -> int | None:
        """Arrival number of the head, None if nothing is ready; drops entries that outlived their request."""
        lanes = self._lanes
        while lanes and lanes[0].stale:
            lanes.popleft()
        return lanes[0].arrival if lanes else None

    def take(self, budget: int, turn: int, allow: Allow, taken: Taken) -> int:
        """Move turns from the head to ``taken`` until the budget is full; returns what is left of it.

        Lanes for which there is no room keep their place.
        """
        lanes, kept = self._lanes, []
        while lanes and budget:
            lane = lanes.popleft()
            if lane.stale:
                continue
            wanted = min(lane.turn or turn, ready_rows(lane))
            count = min(wanted, budget)
            if not lane.depth:
                count = allow(lane, count, taken)
            if count:
                budget -= count
                taken.append((lane, count))
                lane.turn = wanted - count
            if count < wanted:
                kept.append(lane)
            else:
                lane.queued = False
        lanes.extendleft(reversed(kept))
        return budget

    def put_back(self, lane: Lane, count: int) -> None:
        """The step does without the last ``count`` rows it took of ``lane``: they are the lane's turn, in its place."""
        lane.turn += count
        if lane.queued:
            return
        lane.queued = True
        lanes, before = self._lanes, []
        while lanes and lanes[0].arrival < lane.arrival:
            before.append(lanes.popleft())
        lanes.appendleft(lane)
        lanes.extendleft(reversed(before))


def ready_rows(lane: Lane) -> int:
    """Rows that may go into one span, which never joins prompt and decoded positions."""
    start, end, prompt = lane.next, lane.limit, lane.request.prefill_end
    return (prompt if start < prompt < end else end) - start
