"""Transitions of a request's frontier: what a planned step, an exit and a gate's decision make ready.

The RFC's "Dependency graph" as arithmetic: here, and nowhere else, the lanes of a request on the device move on, and
``known`` and ``held_depth`` with them. Each transition is one event. A request that goes to the queue or comes from it
is moved as a whole (`Request.restart`, `Request.restore`).
"""

from wavegraph.scheduler.lanes import Taken
from wavegraph.scheduler.order import Order
from wavegraph.scheduler.request import Request


class Transitions:
    """Moves lanes on, and tells the ``order`` which of them have ready rows now."""

    def __init__(self, order: Order) -> None:
        self._order = order

    def run(self, lanes: Taken) -> list[Request]:
        """A step boundary: these lanes ran so many rows. Returns the requests that are due for a coda row.

        Of those the newest position is held where it is (``held_depth``): it may leave there.
        """
        for lane, count in lanes:
            lane.next += count
        held = []
        ready = self._order.ready
        for lane, _ in lanes:
            request, depth, limit = lane.request, lane.depth, lane.next
            if limit == request.known:
                first, last = request.exit_window()
                if first <= depth <= last:
                    held.append(request)
                    request.held_depth = depth
                    limit -= 1  # the newest position goes on once its coda row is planned, or its gate has decided
            if depth + 1 < len(request.lanes):
                deeper = request.lanes[depth + 1]
                deeper.limit = limit
                ready(deeper)
            ready(lane)
        return held

    def leave(self, request: Request, depth: int) -> None:
        """The newest position leaves at ``depth``: its token is known to the device, the next one may start.

        Its own remaining depths follow as ordinary rows, or, under ``copy``, are done with.
        """
        position, request.known = request.known, request.known + 1
        if request.copies_from(depth):
            request.held_depth = -1
            for lane in request.lanes[depth + 1 :]:
                lane.next = lane.limit = position
        else:
            self.stay(request)
        request.lanes[0].limit = request.known
        self._order.ready(request.lanes[0])

    def stay(self, request: Request) -> None:
        """The newest position goes on to the depth after the one at which it was held."""
        depth, request.held_depth = request.held_depth, -1
        if depth + 1 < len(request.lanes):
            deeper = request.lanes[depth + 1]
            deeper.limit = request.lanes[depth].next
            self._order.ready(deeper)
