"""In which order ready rows are taken. An order holds lanes that have a ready row, each at most once."""

from collections import deque
from dataclasses import dataclass
from typing import Protocol

from wavegraph.scheduler.lanes import Allow, LaneQueue, Taken, ready_rows
from wavegraph.scheduler.packing import PATIENCE, Packer
from wavegraph.scheduler.plan import Kind
from wavegraph.scheduler.request import Lane, Request


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

    def take(self, allow: Allow) -> Taken:
        """Lanes and row counts of the next step."""
        ...

    @property
    def chose(self) -> bool:
        """Whether the last step was chosen from all that was ready, and not the next depth of a cohort."""
        ...

    @property
    def others_ready(self) -> bool:
        """Whether rows are ready of a kind that the last step could not hold."""
        ...


class _Queues:
    """The two queues and the choice between them, shared by both orders."""

    def __init__(self, policy: StagePolicy, packer: Packer) -> None:
        self._policy = policy
        self._packer = packer
        self._prompts = LaneQueue()
        self._decodes = LaneQueue()
        self._arrivals = 0

    def offer(self, lane: Lane) -> None:
        """Queue a lane that is not queued, if it has ready rows and its request is here and still wants them."""
        request = lane.request
        if lane.queued or lane.next >= lane.limit or request.slot < 0 or request.known >= request.total_limit:
            return
        self._arrivals += 1
        self._queue_of(lane).push(lane, self._arrivals)

    def take(self, allow: Allow, fused: bool) -> Taken:
        packer, prompts, decodes = self._packer, self._prompts, self._decodes
        ready = [queue for queue in (prompts, decodes) if queue.oldest is not None]
        due = prompts.waited >= PATIENCE
        paced = fused and packer.pace is not None and packer.pace.active
        if len(ready) == 2 and (paced or self._policy.first(prompts, decodes) is Kind.DECODE):
            ready.reverse()
        taken: Taken = []
        budget = packer.budget
        reserved = min(packer.turn, budget) if paced and due and len(ready) == 2 else 0
        for queue in ready:
            held = reserved if queue is decodes else 0
            if budget > held and (fused or not taken):
                budget = held + queue.take(budget - held, packer.turn, allow, taken)
        if not taken:
            return taken
        for lane, count in packer.fit(taken, packer.budget - budget, not budget and self.any_ready, due, allow):
            self._queue_of(lane).put_back(lane, count)
        ran = {self._queue_of(lane) for lane, _ in (taken[0], taken[-1])}
        for queue in ready:
            queue.waited = 0 if queue in ran else queue.waited + 1
        return taken

    @property
    def any_ready(self) -> bool:
        """Whether a lane is queued."""
        return self._prompts.oldest is not None or self._decodes.oldest is not None

    def _queue_of(self, lane: Lane) -> LaneQueue:
        return self._prompts if lane.next < lane.request.prefill_end else self._decodes


class WavefrontOrder:
    """Rows of any depth in a step. ``fused`` steps hold prompt and decode rows, others one kind (RFC)."""

    chose = True

    def __init__(self, policy: StagePolicy, fused: bool, packer: Packer) -> None:
        self._queues = _Queues(policy, packer)
        self._fused = fused
        self.ready = self._queues.offer

    def resume(self, request: Request) -> None:
        """Queue every lane of a request that came (back) to the device."""
        for lane in request.lanes:
            self.ready(lane)

    def take(self, allow: Allow) -> Taken:
        """Serve the kind that goes first, then, in a fused step, the other with what is left of the budget."""
        return self._queues.take(allow, self._fused)

    @property
    def others_ready(self) -> bool:
        """Rows of the other kind, if steps hold one."""
        return not self._fused and self._queues.any_ready


class OrdinaryOrder:
    """Ordinary chunked prefill (RFC: ``wavefront_prefill=False``): an atomic plan of all depths.

    A cohort is chosen once, of prompt chunks alone or of decode rows alone, and its depths 0 .. D-1 are handed
    out back to back, with no scheduling inside. Members leave it when they end, exit by copying, or are
    preempted; a member whose gate decision is in flight holds the whole cohort. Requests that arrive in the
    middle of a wavefront (swapped in, imported) first catch up, one depth of one request at a time.
    """

    def __init__(self, policy: StagePolicy, depths: int, packer: Packer) -> None:
        self._queues = _Queues(policy, packer)
        self._packer = packer
        self.chose = True
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

    @property
    def others_ready(self) -> bool:
        """Rows of the other kind: a cohort is of one."""
        return self._queues.any_ready

    def take(self, allow: Allow) -> Taken:
        """The running cohort's next depth, without members that left; else depth 0 of a new cohort."""
        self.chose = False
        while self._depth + 1 < self._depths:
            depth = self._depth + 1
            # A member that left by copying its KV has moved its deeper lanes on without running them.
            members = [m for m in self._cohort if not m[0].stale and m[0].request.lanes[depth].next == m[1]]
            if any(lane.request.held_depth >= 0 for lane, _, _ in members):
                return []
            self._depth = depth
            if members:
                return [(lane.request.lanes[depth], count) for lane, _, count in members]
        self.chose = True
        lagging = self._catch_up()
        if lagging or self._behind:
            return lagging
        starts = self._queues.take(allow, fused=False)
        self._cohort = [(lane, lane.next, count) for lane, count in starts]
        self._depth = 0 if starts else self._depths - 1
        return starts

    def _catch_up(self) -> Taken:
        while self._behind:
            request = self._behind[0]
            if request.slot >= 0 and request.held_depth >= 0:
                return []  # its gate's decision may send it on
            lane = _lagging_lane(request)
            if lane is not None:
                return [(lane, min(self._packer.longest_span, ready_rows(lane)))]
            self._behind.popleft()
            self.ready(request.lanes[0])
        return []


def _lagging_lane(request: Request) -> Lane | None:
    """The shallowest lane above depth 0 with ready rows, of a request that is on the device."""
    if request.slot < 0:
        return None
    return next((lane for lane in request.lanes[1:] if lane.next < lane.limit), None)
