"""Who is on the device: slots, pages, admission, prefix hits, growth and preemption.

Everything the device must be told goes into the plan at hand. That plan may stay unused for a while (nothing is
ready), so whatever is written for a request is taken back if it leaves before the plan is handed out.
"""

from collections import Counter
from collections.abc import Collection

from wavegraph.scheduler.admission import WaitingQueue
from wavegraph.scheduler.config import SchedulerConfig
from wavegraph.scheduler.lanes import Taken
from wavegraph.scheduler.pages import PagePool, PrefixKey, prefix_key
from wavegraph.scheduler.plan import StepPlan
from wavegraph.scheduler.request import Request

UPDATE_FIELDS = (
    ("token_slot", "token_pos", "token_id"),
    ("page_slot", "page_index", "page_id"),
    ("param_slot", "param_row", "param_owner"),
)
"""Parallel lists of a plan that update the device's tables, the slot first."""


class Residency:
    """Slots, pages and the waiting queue.

    ``running`` maps ids to the requests on the device, ``live`` generations to all that have not ended.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self.pages = PagePool(config.num_pages)
        self.waiting = WaitingQueue(config.ranking)
        self.running: dict[str, Request] = {}
        self.live: dict[int, Request] = {}
        self._priorities: Counter[int] = Counter()  # of the running requests
        self._generations = 0
        self._arrivals = 0
        self.free_slots = list(range(config.max_num_seqs - 1, -1, -1))
        self.swapped_pages = 0
        self.preemptions = 0
        self.prefix_queries = 0
        self.prefix_hits = 0

    def find(self, request_id: str) -> Request | None:
        """The live request of that id, running or waiting."""
        return self.running.get(request_id) or self.waiting.get(request_id)

    def enqueue(self, request: Request) -> None:
        """Let a request wait, new or with its pages on the host; it arrives with that."""
        self._arrivals += 1
        request.arrival = self._arrivals
        self._register(request)
        self.swapped_pages += request.swapped_pages
        self.waiting.push(request)

    def _register(self, request: Request) -> None:
        """Give a request its generation."""
        self._generations += 1
        request.generation = self._generations
        self.live[request.generation] = request

    # -- coming --------------------------------------------------------------------------------------------

    def admit(self, plan: StepPlan) -> list[Request]:
        """Bring in waiting requests by rank, while slots and pages last; returns them.

        One that does not fit yet may be passed by ``max_bypass`` others in all, then everybody waits for it.
        """
        admitted: list[Request] = []
        if not self._config.refill and self.running:
            return admitted
        while len(self.waiting):
            head = self.waiting.first(1)[0]
            if self._place(plan, head):
                admitted.append(self._moved_in(head))
            elif not self._pass_over(plan, head, admitted):
                break
        # One that came in past a blocked head may have had to leave again for it.
        return [request for request in dict.fromkeys(admitted) if request.slot >= 0]

    def _pass_over(self, plan: StepPlan, head: Request, admitted: list[Request]) -> bool:
        """Admit the next request behind a blocked head, if the head may still be passed."""
        if not self.free_slots or head.passed_over >= self._config.max_bypass:
            return False
        for request in self.waiting.first(1 + self._config.max_bypass)[1:]:
            if self._place(plan, request):
                head.passed_over += 1
                admitted.append(self._moved_in(request))
                return True
        return False

    def _moved_in(self, request: Request) -> Request:
        self.waiting.remove(request)
        self.running[request.spec.request_id] = request
        self._priorities[request.spec.priority] += 1
        return request

    def _place(self, plan: StepPlan, request: Request) -> bool:
        """Give a request its slot and first pages, preempting requests of a lower priority if need be."""
        if request.in_flight:
            return False  # swapped out with results on their way; what it may do next depends on them
        while not (self.free_slots and self._claim_pages(request)):
            victim = self._victim(request, (), lower_priority=True)
            if victim is None:
                return False
            self.preempt(plan, victim)
        request.slot = self.free_slots.pop()
        self._announce(plan, request)
        return True

    def _claim_pages(self, request: Request) -> bool:
        """Hold or reserve what a request needs to start: its worst case, or the tokens it has.

        A page is left for each running request that may still grow: one that came in on their last pages would only
        be preempted for them.
        """
        config, size = self._config, self._config.page_size
        room = self.pages.available - sum(
            len(other.pages) + other.reserved < other.pages_needed for other in self.running.values()
        )
        if request.swapped:
            held = request.swapped_pages
            reserved = max(held, request.pages_needed) if config.reserve_worst_case else held
            if reserved > room or not self.pages.reserve(reserved):
                return False
            request.reserved = reserved
            self._take_pages(request, held)
            return True
        shared, key = self._cached_prefix(request)
        known = min(-(-request.known // size), request.pages_needed)
        needed = (request.pages_needed if config.reserve_worst_case else known) - len(shared)
        if needed > room or not self.pages.reserve_with(shared, needed):
            return False
        request.reserved = needed
        request.pages = shared
        if shared:
            request.restart(config.depths, len(shared) * size)
            request.published, request.published_key = len(shared), key
        if config.prefix_cache:
            if not request.num_output_tokens:
                request.cached_tokens = len(shared) * size
            self.prefix_hits += len(shared) * size
            self.prefix_queries += request.known
        return True

    def _take_pages(self, request: Request, count: int) -> None:
        request.pages.extend(self.pages.take() for _ in range(count))
        request.reserved -= count

    def _announce(self, plan: StepPlan, request: Request) -> None:
        """Tell the device what a request brings: parameters, pages and, if CODA looks back, its tokens."""
        plan.param_slot.append(request.slot)
        plan.param_row.append(request.spec.device_params)
        plan.param_owner.append((request.spec.request_id, request.generation))
        if request.swapped:
            plan.swap_in.append((request.generation, list(request.pages)))
            self.swapped_pages -= len(request.pages)
            request.swapped = False
            request.host_end = len(request.tokens)
        for index, page in enumerate(request.pages):
            plan.page_slot.append(request.slot)
            plan.page_index.append(index)
            plan.page_id.append(page)
        start = request.lanes[0].next
        if start and (request.spec.needs_history or request.to_score):
            plan.token_slot.extend([request.slot] * start)
            plan.token_pos.extend(range(start))
            plan.token_id.extend(request.tokens[:start])

    # -- staying -------------------------------------------------------------------------------------------

    def room(self, plan: StepPlan, request: Request, end: int, taken: Taken) -> int:
        """Make sure that positions below ``end`` have pages, as far as possible; returns the position reached.

        Takes pages from the least important request that is less important than this one and not in the step that is
        being ``taken``. The most important request can always grow, so there is no deadlock and no livelock.
        """
        size, pages = self._config.page_size, request.pages
        while len(pages) * size < end:
            if not request.reserved:
                if not self.pages.reserve(1):
                    victim = self._victim(request, {lane.request for lane, _ in taken})
                    if victim is None:
                        return len(pages) * size
                    self.preempt(plan, victim)
                    continue
                request.reserved = 1
            plan.page_slot.append(request.slot)
            plan.page_index.append(len(pages))
            self._take_pages(request, 1)
            plan.page_id.append(pages[-1])
        return end

    def publish(self, request: Request) -> None:
        """Enter pages into the prefix index that are complete at every depth and hold accepted tokens only.

        Never what a `copy` exit wrote, nor anything of a request that reports prompt log-probabilities.
        """
        if not self._config.prefix_cache or request.spec.score_prompt or request.slot < 0:
            return
        size = self._config.page_size
        end = min(*request.completed, len(request.tokens))
        if request.rule.copy:
            end = min(end, request.num_prompt_tokens)
        while (request.published + 1) * size <= end:
            start = request.published * size
            request.published_key = prefix_key(request.published_key, request.tokens[start : start + size])
            self.pages.publish(request.published_key, request.pages[request.published])
            request.published += 1

    def _cached_prefix(self, request: Request) -> tuple[list[int], PrefixKey]:
        """Pages of the longest published prefix that leaves the request at least one position to run."""
        pages: list[int] = []
        key: PrefixKey = b""
        if not self._config.prefix_cache or request.spec.score_prompt:
            return pages, key
        size = self._config.page_size
        while (end := (len(pages) + 1) * size) < request.prefill_end:
            following = prefix_key(key, request.tokens[end - size : end])
            page = self.pages.lookup(following)
            if page is None:
                break
            key = following
            pages.append(page)
        return pages, key

    def carry_over(self, failed: StepPlan, draft: StepPlan) -> StepPlan:
        """A draft that also says what ``failed``, which never reached the device, would have said first.

        What concerned requests that have ended since is left out.
        """
        slots = {request.slot for request in self.running.values()}
        for names in UPDATE_FIELDS:
            keep = [i for i, slot in enumerate(getattr(failed, names[0])) if slot in slots]
            for name in names:
                values = getattr(failed, name)
                getattr(draft, name)[:0] = [values[i] for i in keep]
        draft.swap_out[:0] = [entry for entry in failed.swap_out if entry[0] in self.live]
        draft.swap_in[:0] = [entry for entry in failed.swap_in if entry[0] in self.live]
        draft.swap_drop[:0] = [*failed.swap_drop, *(key for key, _ in failed.swap_in if key not in self.live)]
        draft.restarts[:0] = failed.restarts
        return draft

    # -- leaving -------------------------------------------------------------------------------------------

    def preempt(self, plan: StepPlan, request: Request) -> None:
        """Send a running request back to the queue: its state to the host if it fits there, else recomputed."""
        self.preemptions += 1
        held = len(request.pages)
        arrival = (request.generation, list(request.pages))
        if arrival in plan.swap_in:
            plan.swap_in.remove(arrival)  # it came back with this very plan: the host still has it
            self._keep_on_host(request, held)
        elif request.lanes[0].next == request.started:
            pass  # it has run nothing: its pages hold what the prefix cache has, or nothing
        elif self.swapped_pages + held <= self._config.swap_pages:
            plan.swap_out.append(arrival)
            self._keep_on_host(request, held)
        self._leave(plan, request)
        if request.swapped:
            request.resume_where_it_stands()
        else:
            plan.restarts.append(request.generation)
            self._renew(request)
        self.waiting.push(request)

    def _renew(self, request: Request) -> None:
        """Start over under a new generation; results in flight for the old one are void."""
        del self.live[request.generation]
        self._register(request)
        request.in_flight = 0
        request.restart(self._config.depths, 0)

    def _keep_on_host(self, request: Request, held: int) -> None:
        request.swapped = True
        request.swapped_pages = held
        self.swapped_pages += held

    def end(self, plan: StepPlan, request: Request) -> None:
        """Release all a request holds; its queue entries turn stale and are skipped."""
        del self.live[request.generation]
        if request.slot >= 0:
            self._leave(plan, request)
            return
        self.waiting.remove(request)
        if request.swapped:
            self.swapped_pages -= request.swapped_pages
            plan.swap_drop.append(request.generation)

    def _leave(self, plan: StepPlan, request: Request) -> None:
        """Release slot and pages; take back what the unused plan says about them."""
        del self.running[request.spec.request_id]
        priority = request.spec.priority
        self._priorities[priority] -= 1
        if not self._priorities[priority]:
            del self._priorities[priority]
        request.retire()
        _withdraw(plan, request.slot)
        arriving = [entry for entry in plan.swap_in if entry[0] == request.generation]
        for entry in arriving:
            plan.swap_in.remove(entry)
            plan.swap_drop.append(request.generation)
        self.free_slots.append(request.slot)
        request.slot = -1
        self.pages.unreserve(request.reserved)
        request.reserved = 0
        self.pages.release(reversed(request.pages))
        request.pages = []

    def _victim(self, request: Request, selected: Collection[Request], lower_priority: bool = False) -> Request | None:
        """The least important running request below ``request`` that the step has not selected."""
        if lower_priority and max(self._priorities, default=0) <= request.spec.priority:
            return None
        rank = self._config.ranking.rank
        candidates = [
            other
            for other in self.running.values()
            if other not in selected
            and rank(other) > rank(request)
            and (not lower_priority or other.spec.priority > request.spec.priority)
        ]
        return max(candidates, key=rank, default=None)


def _withdraw(plan: StepPlan, slot: int) -> None:
    """Remove a slot's updates from a plan that was not handed out: its next owner's must stand alone."""
    for names in UPDATE_FIELDS:
        slots: list[int] = getattr(plan, names[0])
        if slot in slots:
            keep = [i for i, owner in enumerate(slots) if owner != slot]
            for name in names:
                values = getattr(plan, name)
                setattr(plan, name, [values[i] for i in keep])
