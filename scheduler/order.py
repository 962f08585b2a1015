"""In which order ready rows are taken. An order holds lanes that have a ready row, each at most once."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from wavegraph.scheduler.plan import Kind
from wavegraph.scheduler.request import Lane, Request

Taken = list[tuple[Lane, int]]
"""Lanes of a step and their row counts."""

Allow = Callable[[Lane, int, Taken], int]
"""Asks for how many of ``count`` rows of a depth-0 lane the KV pool has room; it may make room, but not at the cost of
requests that the step has taken. Deeper rows have their pages."""


class LaneQueue:
    """Ready lanes of one kind, first come, first served.

    A lane is queued when a finished predecessor makes a row of it ready. When the budget cuts a lane's turn
    short, it keeps its place at the head for the rest of that turn. A turn is at most ``chunk`` rows and each
    lane is queued once, so a lane waits for at most ``ceil(lanes * chunk / budget)`` steps that serve its queue.
    ``waited`` counts the steps in a row that found the queue ready and took nothing from it.
    """

    __slots__ = ("_lanes", "waited")

    def __init__(self) -> None:
        self._lanes: deque[tuple[int, Lane]] = deque()
        self.waited = 0

    def push(self, lane: Lane, arrival: int) -> None:
        """Queue a lane at the tail."""
        lane.queued = True
        self._lanes.append((arrival, lane))

    @property
    def oldest(self) -> int | None:
        """Arrival number of the head, None if nothing is ready; drops entries that outlived their request."""
        lanes = self._lanes
        while lanes and lanes[0][1].stale:
            lanes.popleft()
        return lanes[0][0] if lanes else None

    def take(self, budget: int, chunk: int, allow: Allow, taken: Taken) -> int:
        """Move turns from the head to ``taken`` until the budget is full; returns what is left of it.

        Lanes for which there is no room keep their place.
        """
        lanes, kept = self._lanes, []
        while lanes and budget:
            entry = lanes.popleft()
            lane = entry[1]
            if lane.stale:
                continue
            wanted = min(lane.turn or chunk, _ready_rows(lane))
            count = min(wanted, budget)
            if not lane.depth:
                count = allow(lane, count, taken)
            if count:
                budget -= count
                taken.append((lane, count))
                lane.turn = wanted - count
            if count < wanted:
                kept.append(entry)
            else:
                lane.queued = False
        lanes.extendleft(reversed(kept))
        return budget


def _ready_rows(lane: Lane) -> int:
    """Rows that may go into one span, which never joins prompt and decoded positions."""
    start, end, prompt = lane.next, lane.limit, lane.request.prefill_end
    return (prompt if start < prompt < end else end) - start


class StagePolicy(Protocol):
    """Which kind goes first when both are ready: plain functions of who has waited how long."""

    def first(self, prompts: LaneQueue, decodes: LaneQueue) -> Kind:
        """Choose for one step (in ordinary prefill: for one cohort)."""
        ...


@dataclass(frozen=True, slots=True)
class Fifo:
    """Whichever kind's head has waited longest. Neither kind waits for more than the rows ahead of it."""

    def first(self, prompts: LaneQueue, decodes: LaneQueue) -> Kind:
        """The older head's kind."""
        oldest_prompt, oldest_decode = prompts.oldest, decodes.oldest
        assert oldest_prompt is not None
        assert oldest_decode is not None
        return Kind.PROMPT if oldest_prompt < oldest_decode else Kind.DECODE


@dataclass(frozen=True, slots=True)
class DecodeFirst:
    """Decode rows first. Prompts go first once they were shut out ``max_decode_steps_before_prefill`` times."""

    max_decode_steps_before_prefill: int = 8

    def first(self, prompts: LaneQueue, decodes: LaneQueue) -> Kind:
        """DECODE, unless prompts have waited out the limit."""
        return Kind.PROMPT if prompts.waited >= self.max_decode_steps_before_prefill else Kind.DECODE


@dataclass(frozen=True, slots=True)
class Refill:
    """Prompts first, to refill the batch. Decode goes first once shut out ``max_prefill_steps_before_decode`` times."""

    max_prefill_steps_before_decode: int = 4

    def first(self, prompts: LaneQueue, decodes: LaneQueue) -> Kind:
        """PROMPT, unless decode rows have waited out the limit."""
        return Kind.DECODE if decodes.waited >= self.max_prefill_steps_before_decode else Kind.PROMPT


class Order(Protocol):
    """What `Scheduler` asks of an order."""

    def ready(self, lane: Lane) -> None:
        """A submitted step has left ``lane`` with ready rows, perhaps; queue it unless it is queued."""
        ...

    def resume(self, request: Request) -> None:
        """A request came to the device, new or in mid-life: queue what is ready."""
        ...

    def take(self, budget: int, chunk: int, allow: Allow) -> Taken:
        """Lanes and row counts of the next step: at most ``budget`` rows, at most ``chunk`` of one lane."""
        ...


class _Queues:
    """The two queues and the choice between them, shared by both orders."""

    def __init__(self, policy: StagePolicy) -> None:
        self._policy = policy
        self._prompts = LaneQueue()
        self._decodes = LaneQueue()
        self._arrivals = 0

    def offer(self, lane: Lane) -> None:
        """Queue a lane that is not queued, if it has ready rows and its request is here and still wants them."""
        request = lane.request
        if lane.queued or lane.next >= lane.limit or request.slot < 0 or request.known >= request.total_limit:
            return
        self._arrivals += 1
        queue = self._prompts if lane.next < request.prefill_end else self._decodes
        queue.push(lane, self._arrivals)

    def take(self, budget: int, chunk: int, allow: Allow, fused: bool) -> Taken:
        prompts, decodes = self._prompts, self._decodes
        ready = [queue for queue in (prompts, decodes) if queue.oldest is not None]
        if len(ready) == 2 and self._policy.first(prompts, decodes) is Kind.DECODE:
            ready.reverse()
        taken: Taken = []
        for queue in ready:
            before = len(taken)
            if budget and (fused or not taken):
                budget = queue.take(budget, chunk, allow, taken)
            queue.waited = 0 if len(taken) > before else queue.waited + 1
        return taken


class WavefrontOrder:
    """Rows of any depth in a step. ``fused`` steps hold prompt and decode rows, others one kind (RFC)."""

    def __init__(self, policy: StagePolicy, fused: bool) -> None:
        self._queues = _Queues(policy)
        self._fused = fused
        self.ready = self._queues.offer

    def resume(self, request: Request) -> None:
        """Queue every lane of a request that came (back) to the device."""
        for lane in request.lanes:
            self.ready(lane)

    def take(self, budget: int, chunk: int, allow: Allow) -> Taken:
        """Serve the kind that goes first, then, in a fused step, the other with what is left of the budget."""
        return self._queues.take(budget, chunk, allow, self._fused)


class OrdinaryOrder:
    """Ordinary chunked prefill (RFC: ``wavefront_prefill=False``): an atomic plan of all depths.

    A cohort is chosen once, of prompt chunks alone or of decode rows alone, and its depths 0 .. D-1 are handed
    out back to back, with no scheduling inside. Members leave it when they end, exit by copying, or are
    preempted; a member whose gate decision is in flight holds the whole cohort. Requests that arrive in the
    middle of a wavefront (swapped in, imported) first catch up, one depth of one request at a time.
    """

    def __init__(self, policy: StagePolicy, depths: int) -> None:
        self._queues = _Queues(policy)
        self._depths = depths
        self._cohort: list[tuple[Lane, int, int]] = []
        self._depth = depths - 1
        self._behind: deque[Request] = deque()

    def ready(self, lane: Lane) -> None:
        """Queue a request's next chunk or decode row; deeper lanes follow their cohort by themselves."""
        if lane.depth == 0:
            self._queues.offer(lane)

    def resume(self, request: Request) -> None:
        """A request came (back) to the device, perhaps in the middle of its depths."""
        if request.held_depth >= 0 or _lagging_lane(request) is not None:
            self._behind.append(request)
        else:
            self.ready(request.lanes[0])

    def take(self, budget: int, chunk: int, allow: Allow) -> Taken:
        """The running cohort's next depth, without members that left; else depth 0 of a new cohort."""
        while self._depth + 1 < self._depths:
            depth = self._depth + 1
            # A member that left by copying its KV has moved its deeper lanes on without running them.
            members = [m for m in self._cohort if not m[0].stale and m[0].request.lanes[depth].next == m[1]]
            if any(lane.request.held_depth >= 0 for lane, _, _ in members):
                return []
            self._depth = depth
            if members:
                return [(lane.request.lanes[depth], count) for lane, _, count in members]
        lagging = self._catch_up(min(budget, chunk))
        if lagging or self._behind:
            return lagging
        starts = self._queues.take(budget, chunk, allow, fused=False)
        self._cohort = [(lane, lane.next, count) for lane, count in starts]
        self._depth = 0 if starts else self._depths - 1
        return starts

    def _catch_up(self, rows: int) -> Taken:
        while self._behind:
            request = self._behind[0]
            if request.slot >= 0 and request.held_depth >= 0:
                return []  # its gate's decision may send it on
            lane = _lagging_lane(request)
            if lane is not None:
                return [(lane, min(rows, _ready_rows(lane)))]
            self._behind.popleft()
            self.ready(request.lanes[0])
        return []


def _lagging_lane(request: Request) -> Lane | None:
    """The shallowest lane above depth 0 with ready rows, of a request that is on the device."""
    if request.slot < 0:
        return None
    return next((lane for lane in request.lanes[1:] if lane.next < lane.limit), None)
