"""The scheduler: which rows of which request, at which depth, make the next step (RFC "Proposed Design").

Readiness is arithmetic on the frontier vector (see `request.Lane`): nothing is scanned, and a lane is queued
only when it has a ready row, so every queue entry is ready by construction (RFC "Dependency graph", way 2) and
can be verified at any time (way 1; `checker` does, independently).

`plan` moves the submitted frontier: steps run in the order they were planned, so a later plan may build on an
earlier one that has not finished. `apply` moves the completed frontier and is the only place where tokens,
ends of requests and `num_prefilled_tokens` change.
"""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from wavegraph.buckets.ladder import Ladder
from wavegraph.errors import EngineError, RequestError
from wavegraph.scheduler.order import FifoOrder, Order, OrdinaryOrder
from wavegraph.scheduler.pages import PageAllocator
from wavegraph.scheduler.plan import (
    ExecutionTask,
    ExitPolicy,
    Kind,
    Phase,
    RequestSpec,
    RequestUpdate,
    StepPlan,
    StepResult,
    TaskState,
)
from wavegraph.scheduler.request import Lane, Request

PROMPT, DECODE = Kind.PROMPT, Kind.DECODE
COMPOSITE_DEPTH0, RECURRENT, CODA = Phase.COMPOSITE_DEPTH0, Phase.RECURRENT, Phase.CODA
FULL_DEPTH, DECODE_DEPTH = ExitPolicy.FULL_DEPTH, ExitPolicy.DECODE_DEPTH


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits and order of the scheduler. The caller has validated them (`wavegraph.config`).

    ``depths`` is D; ``max_num_batched_tokens`` the most rows of a step; ``max_num_seqs`` the most requests
    running at once; ``prefill_chunk_size`` the most rows of one request at one depth in a step;
    ``max_model_len`` the most tokens, prompt and output, of a request.
    """

    depths: int
    page_size: int
    num_pages: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    prefill_chunk_size: int
    wavefront: bool = True


@dataclass(slots=True)
class SchedulerStats:
    """Totals since the start. ``rows`` counts live rows of core replays, ``padding_rows`` the rest."""

    steps: int = 0
    rows: int = 0
    padding_rows: int = 0
    spans: int = 0
    prompt_rows: int = 0
    coda_steps: int = 0
    coda_rows: int = 0
    coda_padding_rows: int = 0


class Scheduler:
    """Packs ready rows into steps. No tensor, no torch, no clock.

    ``ladder`` and ``coda_ladder`` give each step its bucket; without one, a step's bucket is its row count.
    """

    def __init__(self, config: SchedulerConfig, ladder: Ladder | None = None, coda_ladder: Ladder | None = None):
        self.config = config
        self.stats = SchedulerStats()
        self._ladder = ladder
        self._coda_ladder = coda_ladder
        self._pages = PageAllocator(config.num_pages)
        self._waiting: OrderedDict[str, Request] = OrderedDict()
        self._running: dict[str, Request] = {}
        self._by_slot: list[Request | None] = [None] * config.max_num_seqs
        self._free_slots = list(range(config.max_num_seqs - 1, -1, -1))
        self._order: Order = FifoOrder() if config.wavefront else OrdinaryOrder(config.depths)
        self._generations = 0
        self._tasks = 0

    # -- requests ------------------------------------------------------------------------------------------

    def add(self, spec: RequestSpec) -> None:
        """Queue a request. Raises `RequestError`, changing nothing, if it could never be served."""
        config = self.config
        name, prompt = spec.request_id, len(spec.prompt_token_ids)
        if name in self._running or name in self._waiting:
            raise RequestError(f"request_id: {name!r} is already in use; ids must be unique among live requests")
        if prompt == 0:
            raise RequestError(f"prompt of request {name!r}: is empty; give at least one token")
        if prompt >= config.max_model_len:
            raise RequestError(
                f"prompt of request {name!r}: has {prompt} tokens, but max_model_len={config.max_model_len} allows at "
                f"most {config.max_model_len - 1} beside one output token; shorten it or raise max_model_len"
            )
        if spec.max_tokens < 1:
            raise RequestError(f"max_tokens of request {name!r}: must be at least 1, got {spec.max_tokens}")
        total = min(prompt + spec.max_tokens, config.max_model_len)
        needed = -(-(total - 1) // config.page_size)  # the last token sampled is never fed back
        if needed > config.num_pages:
            raise RequestError(
                f"request {name!r}: {prompt} prompt tokens and max_tokens={spec.max_tokens} need {needed} KV pages of "
                f"{config.page_size} tokens, but the pool has {config.num_pages}; shorten it or raise num_pages"
            )
        self._generations += 1
        self._waiting[name] = Request(spec, self._generations, config.depths, total, needed)

    def cancel(self, request_id: str) -> bool:
        """End a request at once, wherever it is; False if no such request is live.

        Its pages and slot are free for the next plan. Steps in flight may still touch them, but run before
        any step planned later; their results for this request are dropped by `apply`.
        """
        if self._waiting.pop(request_id, None) is not None:
            return True
        request = self._running.get(request_id)
        if request is None:
            return False
        self._end(request)
        return True

    def fail(self, plan: StepPlan) -> list[str]:
        """End every live request that ``plan`` works for, because it could not be run; returns their ids."""
        failed = dict.fromkeys(task.request_id for task in plan.tasks if self._owner(task) is not None)
        for task in (*plan.tasks, *plan.coda_tasks):
            task.state = TaskState.CANCELLED
        for request_id in failed:
            self.cancel(request_id)
        return list(failed)

    @property
    def has_unfinished(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self._running or self._waiting)

    @property
    def num_waiting(self) -> int:
        """Requests not yet admitted."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests that hold a slot."""
        return len(self._running)

    @property
    def num_free_pages(self) -> int:
        """Pages that no request holds."""
        return self._pages.num_free

    def num_prefilled_tokens(self, request_id: str) -> int:
        """Contiguous prompt tokens of a running request completed at all depths; KeyError if not running."""
        return self._running[request_id].num_prefilled_tokens

    # -- one step ------------------------------------------------------------------------------------------

    def plan(self) -> StepPlan | None:
        """The next step, or None if no row is ready. Calls may run ahead of `apply`."""
        self._admit()
        plan = StepPlan(step_id=self.stats.steps)
        lanes = self._order.take(self.config.max_num_batched_tokens, self.config.prefill_chunk_size)
        if not lanes:
            return None
        for lane, count in lanes:
            self._add_span(plan, lane, count)
        for lane, _ in lanes:
            self._advance(plan, lane)
        plan.bucket = self._ladder.bucket(plan.rows) if self._ladder else plan.rows
        coda_rows = len(plan.coda_slot)
        if coda_rows:
            plan.coda_bucket = self._coda_ladder.bucket(coda_rows) if self._coda_ladder else coda_rows
        self._count(plan)
        return plan

    def apply(self, plan: StepPlan, result: StepResult) -> list[RequestUpdate]:
        """Take a finished step's result: completed frontiers, tokens, ends of requests. Any order of steps."""
        if result.step_id != plan.step_id or len(result.tokens) != len(plan.coda_tasks):
            raise EngineError(
                f"result of step {result.step_id} with {len(result.tokens)} tokens does not answer "
                f"step {plan.step_id} with {len(plan.coda_tasks)} coda rows"
            )
        for task in plan.tasks:
            request = self._settle(task)
            if request is not None:
                request.complete_span(task.depth, task.token_start, task.token_start + task.token_count)
        updates: list[RequestUpdate] = []
        for task, token in zip(plan.coda_tasks, result.tokens, strict=True):
            request = self._settle(task)
            if request is not None:
                updates.extend(self._accept(request, task.token_start + 1, token))
        return updates

    # -- planning ------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """First come, first served, while a slot and the worst case in pages are there."""
        waiting = self._waiting
        while waiting and self._free_slots:
            name = next(iter(waiting))
            request = waiting[name]
            if not self._pages.reserve(request.pages_needed):
                return
            del waiting[name]
            request.slot = self._free_slots.pop()
            self._by_slot[request.slot] = request
            self._running[name] = request
            self._order.ready(request.lanes[0])

    def _add_span(self, plan: StepPlan, lane: Lane, count: int) -> None:
        """Append rows ``next .. next + count`` of a lane to the plan and move the lane's frontier."""
        request, depth, start = lane.request, lane.depth, lane.next
        end = start + count
        prompt = start < request.num_prompt_tokens
        if depth == 0:
            self._grow_pages(plan, request, end)
            if prompt:
                plan.token_slot.extend([request.slot] * count)
                plan.token_pos.extend(range(start, end))
                plan.token_id.extend(request.tokens[start:end])
        lane.next = end
        page_size = self.config.page_size
        self._tasks += 1
        plan.tasks.append(
            ExecutionTask(
                self._tasks,
                plan.step_id,
                request.spec.request_id,
                request.generation,
                request.slot,
                PROMPT if prompt else DECODE,
                RECURRENT if depth else COMPOSITE_DEPTH0,
                depth,
                start,
                count,
                FULL_DEPTH if prompt else DECODE_DEPTH,
                request.pages[start // page_size : (end - 1) // page_size + 1],
            )
        )
        plan.span_slot.append(request.slot)
        plan.span_start.append(start)
        plan.span_count.append(count)
        plan.span_depth.append(depth)
        plan.rows += count

    def _grow_pages(self, plan: StepPlan, request: Request, end: int) -> None:
        pages, page_size = request.pages, self.config.page_size
        while len(pages) * page_size < end:
            plan.page_slot.append(request.slot)
            plan.page_index.append(len(pages))
            page = self._pages.take()
            plan.page_id.append(page)
            pages.append(page)

    def _advance(self, plan: StepPlan, lane: Lane) -> None:
        """Step boundary for one lane that ran: queue what it made ready (RFC "Dependency graph", transitions)."""
        request, depth = lane.request, lane.depth
        if depth + 1 < len(request.lanes):
            successor = request.lanes[depth + 1]
            successor.limit = lane.next
            self._order.ready(successor)
        elif lane.next == request.known:
            self._add_coda(plan, request)
        if lane.next < lane.limit:
            self._order.ready(lane)

    def _add_coda(self, plan: StepPlan, request: Request) -> None:
        """All known tokens are done at all depths: sample the next one, and let it run if it is not the last."""
        position = request.known - 1
        self._tasks += 1
        plan.coda_tasks.append(
            ExecutionTask(
                self._tasks,
                plan.step_id,
                request.spec.request_id,
                request.generation,
                request.slot,
                PROMPT if position < request.num_prompt_tokens else DECODE,
                CODA,
                len(request.lanes) - 1,
                position,
                1,
                FULL_DEPTH,
                [request.pages[position // self.config.page_size]],
            )
        )
        plan.coda_slot.append(request.slot)
        plan.coda_pos.append(position)
        request.known += 1
        if request.known < request.total_limit:
            first = request.lanes[0]
            first.limit = request.known
            self._order.ready(first)

    def _count(self, plan: StepPlan) -> None:
        stats = self.stats
        stats.steps += 1
        stats.rows += plan.rows
        stats.padding_rows += plan.bucket - plan.rows
        stats.spans += len(plan.tasks)
        stats.prompt_rows += sum(task.token_count for task in plan.tasks if task.kind is PROMPT)
        if plan.coda_bucket:
            stats.coda_steps += 1
            stats.coda_rows += len(plan.coda_slot)
            stats.coda_padding_rows += plan.coda_bucket - len(plan.coda_slot)

    # -- results -------------------------------------------------------------------------------------------

    def _owner(self, task: ExecutionTask) -> Request | None:
        request = self._by_slot[task.slot]
        return request if request is not None and request.generation == task.generation else None

    def _settle(self, task: ExecutionTask) -> Request | None:
        """Close a task; returns its request, or None if that ended while the task was in flight."""
        request = self._owner(task)
        task.state = TaskState.COMPLETED if request is not None else TaskState.CANCELLED
        return request

    def _accept(self, request: Request, position: int, token: int) -> Iterable[RequestUpdate]:
        """Add tokens to the output until one ends the request."""
        name = request.spec.request_id
        for accepted in request.accept_token(position, token):
            reason = None
            if accepted in request.spec.stop_token_ids:
                reason = "stop"
            elif len(request.tokens) == request.total_limit:
                reason = "length"
            yield RequestUpdate(name, accepted, reason)
            if reason is not None:
                self._end(request)
                return

    def _end(self, request: Request) -> None:
        """Release all a request holds; its queue entries turn stale and are skipped."""
        del self._running[request.spec.request_id]
        self._by_slot[request.slot] = None
        self._free_slots.append(request.slot)
        self._pages.unreserve(request.pages_needed - len(request.pages))
        self._pages.free(request.pages)
        request.ended = True
