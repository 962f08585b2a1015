"""The scheduler: which rows of which request, at which depth, make the next step (RFC "Proposed Design").

Readiness is arithmetic on the frontier vector (see `request.Lane`): nothing is scanned, and a lane is queued
only when it has a ready row, so every queue entry is ready by construction (RFC "Dependency graph", way 2) and
can be verified at any time (way 1; `checker` does, independently).

`plan` moves the submitted frontier: steps run in the order they were planned, so a later plan may build on an
earlier one that has not finished. `apply` moves the completed frontier and is the only place where tokens,
ends of requests and `num_prefilled_tokens` change.

This file is the two calls and the life of a request between them. Who is on the device is for `residency`, whose turn
it is for `order`, how many rows for `packing`, at which bucket for `padding`, what becomes ready for `transitions` and
`codas`, and what the device is told for `tasks`.
"""

from collections.abc import Iterable

from wavegraph.buckets.assembly import Assembly
from wavegraph.buckets.cost import CostModel
from wavegraph.buckets.ladder import Ladder
from wavegraph.errors import EngineError, RequestError
from wavegraph.scheduler.codas import CodaQueue
from wavegraph.scheduler.config import SchedulerConfig
from wavegraph.scheduler.intake import new_request, restored_request
from wavegraph.scheduler.lanes import Taken
from wavegraph.scheduler.order import Order, OrdinaryOrder, WavefrontOrder
from wavegraph.scheduler.packing import Pace, Packer
from wavegraph.scheduler.padding import BucketChoice
from wavegraph.scheduler.plan import (
    CodaAction,
    ExecutionTask,
    RequestSpec,
    RequestUpdate,
    StepPlan,
    StepResult,
    TaskState,
)
from wavegraph.scheduler.request import Lane, Request, RequestSnapshot
from wavegraph.scheduler.residency import Residency
from wavegraph.scheduler.stats import SchedulerStats
from wavegraph.scheduler.tasks import TaskWriter
from wavegraph.scheduler.transitions import Transitions

SAMPLE, GATE, SCORE, REPLAY = CodaAction.SAMPLE, CodaAction.GATE, CodaAction.SCORE, CodaAction.REPLAY


class Scheduler:
    """Packs ready rows into steps. No tensor, no torch, no clock.

    ``ladder`` and ``coda_ladder`` give each step its bucket; without one, a step's bucket is its row count.
    ``cost`` predicts what a step takes; None: `CostModel.assumed`.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        ladder: Ladder | None = None,
        coda_ladder: Ladder | None = None,
        cost: CostModel | None = None,
    ) -> None:
        self.config = config
        self.cost = cost if cost is not None else CostModel.assumed(config.max_num_batched_tokens)
        self.stats = SchedulerStats()
        self._coda_ladder = coda_ladder
        self._residency = Residency(config)
        assembly = None
        if config.packing == "fill" and ladder is not None:
            assembly = Assembly(ladder, self.cost, config.max_num_batched_tokens, config.depths)
        pace = _make_pace(config, ladder, coda_ladder, self.cost)
        packer = Packer(
            config.max_num_batched_tokens, config.prefill_chunk_size, assembly, pace, atomic=not config.wavefront
        )
        order: Order = (
            WavefrontOrder(config.stage_policy, config.fused, packer)
            if config.wavefront
            else OrdinaryOrder(config.stage_policy, config.depths, packer)
        )
        self._pace = pace
        self._order = order
        self._buckets = BucketChoice(ladder, assembly, packer, order)
        self._writer = TaskWriter(config.page_size)
        self._transitions = Transitions(order)
        self._codas = CodaQueue(config.coda_row_limit, self._writer, self._transitions)
        self._draft = StepPlan(step_id=0)
        self._short_of_pages = False

    # -- requests ------------------------------------------------------------------------------------------

    def add(self, spec: RequestSpec) -> None:
        """Queue a request. Raises `RequestError`, changing nothing, if it could never be served."""
        self._require_new_id(spec.request_id)
        self._residency.enqueue(new_request(spec, self.config))

    def _require_new_id(self, request_id: str) -> None:
        if self._residency.find(request_id) is not None:
            raise RequestError(f"request_id: {request_id!r} is already in use; ids must be unique among live requests")

    def cancel(self, request_id: str) -> bool:
        """End a request at once, wherever it is; False if no such request is live.

        Its pages and slot are free for the next plan. Steps in flight may still touch them, but run before
        any step planned later; their results for this request are dropped by `apply`.
        """
        request = self._residency.find(request_id)
        if request is None:
            return False
        self._residency.end(self._draft, request)
        return True

    def fail(self, plan: StepPlan) -> list[str]:
        """End every live request that the newest plan works for, because it could not be run; returns their ids.

        What the plan would have told the device about other requests goes into the next one.
        """
        tasks = (*plan.tasks, *plan.coda_tasks)
        owners = [self._residency.live.get(task.generation) for task in tasks]
        failed = list(dict.fromkeys(owner.spec.request_id for owner in owners if owner is not None))
        for task in tasks:
            task.state = TaskState.CANCELLED
        self._draft = self._residency.carry_over(plan, self._draft)
        for request_id in failed:
            self.cancel(request_id)
        return failed

    def preempt(self, request_id: str) -> bool:
        """Send a running request back to the queue, as pressure would; False if it is not running."""
        request = self._residency.running.get(request_id)
        if request is None:
            return False
        self._residency.preempt(self._draft, request)
        return True

    def export_request(self, request_id: str) -> tuple[RequestSnapshot, int | None]:
        """The state of a live request, which goes on living; read its pages, then `cancel` it.

        With it comes the key under which its pages' content is on the host, or None if it is in the pages named.
        Raises `RequestError` if the request is not live or has steps in flight.
        """
        request = self._residency.find(request_id)
        if request is None:
            raise RequestError(f"request_id: {request_id!r} is not live, so it cannot be exported")
        if request.in_flight:
            raise RequestError(f"request {request_id!r}: has steps in flight; take their results before it is exported")
        if not request.swapped:
            arriving = any(key == request.generation for key, _ in self._draft.swap_in)
            return request.snapshot(list(request.pages)), request.generation if arriving else None
        leaving = dict(self._draft.swap_out).get(request.generation)
        if leaving is not None:
            return request.snapshot(leaving), None
        return request.snapshot(list(range(request.swapped_pages))), request.generation

    def import_request(self, snapshot: RequestSnapshot) -> int:
        """Queue a request in mid-life; returns the key under which its pages' content must be on the host.

        Raises `RequestError` as `add` does.
        """
        self._require_new_id(snapshot.spec.request_id)
        request = restored_request(snapshot, self.config)
        self._residency.enqueue(request)
        return request.generation

    def forget_prefixes(self) -> None:
        """Drop the prefix cache, as when the weights change."""
        self._residency.pages.forget_prefixes()

    @property
    def has_unfinished(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self._residency.live)

    @property
    def num_waiting(self) -> int:
        """Requests that hold no slot: new, or preempted."""
        return len(self._residency.waiting)

    @property
    def num_running(self) -> int:
        """Requests that hold a slot."""
        return len(self._residency.running)

    @property
    def waits_for_gates(self) -> bool:
        """Whether half the running requests or more wait for their gate's decision: a step would run without them."""
        running = self._residency.running.values()
        held = sum(request.held_depth >= 0 for request in running)
        return held > 0 and 2 * held >= len(running)

    @property
    def residency(self) -> Residency:
        """Slots, pages and queue, for statistics."""
        return self._residency

    def num_prefilled_tokens(self, request_id: str) -> int:
        """Contiguous prompt tokens of a running request completed at all depths; KeyError if not running."""
        return self._residency.running[request_id].num_prefilled_tokens

    # -- one step ------------------------------------------------------------------------------------------

    def plan(self) -> StepPlan | None:
        """The next step, or None if nothing is ready. Calls may run ahead of `apply`."""
        plan = self._draft
        for request in self._residency.admit(plan):
            self._codas.resume(request)
            self._order.resume(request)
        if self._pace is not None:
            self._set_pace(self._pace)
        self._short_of_pages = False
        lanes = self._order.take(self._allow)
        if lanes:
            self._buckets.choose(plan, lanes, self._short_of_pages)
            self._writer.add_spans(plan, lanes)
            self._codas.ask(self._transitions.run(lanes))
        self._codas.add_to(plan)
        if not plan.rows and not plan.coda_slot:
            return None
        coda_rows = len(plan.coda_slot)
        if coda_rows:
            plan.coda_bucket = self._coda_ladder.bucket(coda_rows) if self._coda_ladder else coda_rows
        self.stats.count(plan)
        self._draft = StepPlan(step_id=self.stats.steps)
        return plan

    def _allow(self, lane: Lane, count: int, taken: Taken) -> int:
        """For how many rows of a depth-0 lane the pool has pages."""
        start = lane.next
        room = self._residency.room(self._draft, lane.request, start + count, taken) - start
        self._short_of_pages |= room < count
        return room

    def _set_pace(self, pace: Pace) -> None:
        """Tell the target whether decodes are live, and the coda rows that earlier steps have left to this one."""
        running = self._residency.running.values()
        pace.active = any(request.prefill_end < request.known < request.total_limit for request in running)
        pace.codas = self._codas.waiting

    # -- results -------------------------------------------------------------------------------------------

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
                if task.depth == self.config.depths - 1:
                    self._residency.publish(request)
        updates: list[RequestUpdate] = []
        for row, task in enumerate(plan.coda_tasks):
            request = self._settle(task)
            if request is not None:
                updates.extend(self._apply_coda(plan, request, row, result.tokens[row]))
        return updates

    def _settle(self, task: ExecutionTask) -> Request | None:
        """Close a task; returns its request, or None if that ended or started over while it was in flight."""
        request = self._residency.live.get(task.generation)
        if request is None:
            task.state = TaskState.CANCELLED
            return None
        task.state = TaskState.COMPLETED
        request.in_flight -= 1
        return request

    def _apply_coda(self, plan: StepPlan, request: Request, row: int, token: int) -> Iterable[RequestUpdate]:
        task, action = plan.coda_tasks[row], plan.coda_action[row]
        if action == SCORE:
            return ()
        left = token >= 0 or action == REPLAY
        if action == SAMPLE and not left:
            raise EngineError(f"step {plan.step_id}: coda row {row} of request {task.request_id!r} drew no token")
        if action == GATE:
            if left:
                self._transitions.leave(request, task.depth)
            else:
                self._transitions.stay(request)
        if left and request.copies_from(task.depth):
            for depth in range(task.depth + 1, self.config.depths):
                request.complete_span(depth, task.token_start, task.token_start + 1)
        if action == REPLAY or not left:
            return ()
        return self._accept(request, task.token_start + 1, token, task.depth, plan.step_id, row)

    def _accept(
        self, request: Request, position: int, token: int, exit_depth: int, step_id: int, row: int
    ) -> Iterable[RequestUpdate]:
        """Add tokens to the output until one ends the request."""
        name = request.spec.request_id
        for accepted, depth, step, coda_row in request.accept_token(position, token, exit_depth, step_id, row):
            reason = None
            if accepted in request.spec.stop_token_ids:
                reason = "stop"
            elif len(request.tokens) == request.total_limit:
                reason = "length"
            yield RequestUpdate(name, accepted, reason, depth, step, coda_row, request.cached_tokens)
            if reason is not None:
                self._residency.end(self._draft, request)
                return


def _make_pace(
    config: SchedulerConfig, ladder: Ladder | None, coda_ladder: Ladder | None, cost: CostModel
) -> Pace | None:
    if config.target_step_seconds is None:
        return None
    codas = coda_ladder if coda_ladder is not None else Ladder(range(1, 1 + config.coda_row_limit))
    return Pace(config.target_step_seconds, config.max_num_batched_tokens, ladder, codas, cost)
