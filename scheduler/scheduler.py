"""The scheduler: which rows of which request, at which depth, make the next step (RFC "Proposed Design").

Readiness is arithmetic on the frontier vector (see `request.Lane`): nothing is scanned, and a lane is queued
only when it has a ready row, so every queue entry is ready by construction (RFC "Dependency graph", way 2) and
can be verified at any time (way 1; `checker` does, independently).

`plan` moves the submitted frontier: steps run in the order they were planned, so a later plan may build on an
earlier one that has not finished. `apply` moves the completed frontier and is the only place where tokens,
ends of requests and `num_prefilled_tokens` change.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from wavegraph.buckets.assembly import Assembly
from wavegraph.buckets.cost import CostModel
from wavegraph.buckets.ladder import Ladder
from wavegraph.errors import EngineError, RequestError
from wavegraph.scheduler.config import SchedulerConfig
from wavegraph.scheduler.lanes import Taken, ready_rows
from wavegraph.scheduler.order import Order, OrdinaryOrder, WavefrontOrder
from wavegraph.scheduler.packing import Pace, Packer
from wavegraph.scheduler.plan import (
    COPY_KV,
    CodaAction,
    ExecutionTask,
    ExitPolicy,
    ExitRule,
    Kind,
    PaddingReason,
    Phase,
    RequestSpec,
    RequestUpdate,
    StepPlan,
    StepResult,
    TaskState,
)
from wavegraph.scheduler.request import Lane, Request, RequestSnapshot
from wavegraph.scheduler.residency import Residency

__all__ = ["Scheduler", "SchedulerConfig", "SchedulerStats"]

PROMPT, DECODE = Kind.PROMPT, Kind.DECODE
COMPOSITE_DEPTH0, RECURRENT, CODA = Phase.COMPOSITE_DEPTH0, Phase.RECURRENT, Phase.CODA
FULL_DEPTH, DECODE_DEPTH = ExitPolicy.FULL_DEPTH, ExitPolicy.DECODE_DEPTH
SAMPLE, GATE, SCORE, REPLAY = CodaAction.SAMPLE, CodaAction.GATE, CodaAction.SCORE, CodaAction.REPLAY


@dataclass(slots=True)
class SchedulerStats:
    """Totals since the start. ``rows`` counts live rows of core replays, ``padding_rows`` the rest; ``padding_reasons``
    says how many of these there were for which `PaddingReason`. ``core_steps`` held rows, ``prompt_steps`` and
    ``decode_steps`` of them rows of one kind only.
    """

    steps: int = 0
    core_steps: int = 0
    prompt_steps: int = 0
    decode_steps: int = 0
    rows: int = 0
    padding_rows: int = 0
    padding_reasons: Counter[str] = field(default_factory=Counter)
    spans: int = 0
    prompt_rows: int = 0
    coda_steps: int = 0
    coda_rows: int = 0
    coda_padding_rows: int = 0


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
        self._ladder = ladder
        self._coda_ladder = coda_ladder
        self._residency = Residency(config)
        self._packer = self._make_packer()
        self._order: Order = (
            WavefrontOrder(config.stage_policy, config.fused, self._packer)
            if config.wavefront
            else OrdinaryOrder(config.stage_policy, config.depths, self._packer)
        )
        self._short_of_pages = False
        self._last_padding = PaddingReason.NONE, 0
        self._draft = StepPlan(step_id=0)
        self._coda_due: list[tuple[Request, int, int]] = []
        self._scoring: list[tuple[Request, int]] = []
        self._max_coda_rows = config.max_coda_rows or config.max_num_seqs
        self._arrivals = 0
        self._tasks = 0

    def _make_packer(self) -> Packer:
        config, pace = self.config, None
        budget, target = config.max_num_batched_tokens, config.target_step_seconds
        if target is not None:
            coda_ladder = self._coda_ladder
            if coda_ladder is None:
                coda_ladder = Ladder(range(1, 1 + (config.max_coda_rows or config.max_num_seqs)))
            pace = Pace(target, budget, self._ladder, coda_ladder, self.cost)
        self._assembly = None
        if config.packing == "fill" and self._ladder is not None:
            self._assembly = Assembly(self._ladder, self.cost, budget, config.depths)
        return Packer(budget, config.prefill_chunk_size, self._assembly, pace, atomic=not config.wavefront)

    # -- requests ------------------------------------------------------------------------------------------

    def add(self, spec: RequestSpec) -> None:
        """Queue a request. Raises `RequestError`, changing nothing, if it could never be served."""
        self._residency.waiting.push(self._new_request(spec))

    def _new_request(self, spec: RequestSpec) -> Request:
        config = self.config
        name, prompt = spec.request_id, len(spec.prompt_token_ids)
        if name in self._residency.running or self._residency.waiting.get(name):
            raise RequestError(f"request_id: {name!r} is already in use; ids must be unique among live requests")
        if prompt == 0:
            raise RequestError(f"prompt of request {name!r}: is empty; give at least one token")
        if prompt >= config.max_model_len:
            raise RequestError(
                f"prompt of request {name!r}: has {prompt} tokens, but max_model_len={config.max_model_len} allows "
                f"at most {config.max_model_len - 1} beside one output token; shorten it or raise max_model_len"
            )
        if spec.max_tokens < 1:
            raise RequestError(f"max_tokens of request {name!r}: must be at least 1, got {spec.max_tokens}")
        total = min(prompt + spec.max_tokens, config.max_model_len)
        needed = -(-(total - 1) // config.page_size)  # the last token sampled is never fed back
        if needed > config.num_pages:
            raise RequestError(
                f"request {name!r}: {prompt} prompt tokens and max_tokens={spec.max_tokens} need {needed} KV pages "
                f"of {config.page_size} tokens, but the pool has {config.num_pages}; shorten it or raise num_pages"
            )
        if spec.score_prompt and spec.exit_rule not in (None, ExitRule(config.depths - 1)):
            raise RequestError(
                f"request {name!r}: prompt log-probabilities are those of full depth; ask for them without early exit"
            )
        self._arrivals += 1
        request = Request(spec, self._arrivals, config.depths, total, needed)
        self._residency.register(request)
        return request

    def cancel(self, request_id: str) -> bool:
        """End a request at once, wherever it is; False if no such request is live.

        Its pages and slot are free for the next plan. Steps in flight may still touch them, but run before
        any step planned later; their results for this request are dropped by `apply`.
        """
        request = self._find(request_id)
        if request is None:
            return False
        self._end(request)
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
        request = self._find(request_id)
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
        request = self._new_request(snapshot.spec)
        if len(snapshot.tokens) >= request.total_limit:
            self._residency.live.pop(request.generation)
            raise RequestError(
                f"request {snapshot.spec.request_id!r}: has {len(snapshot.tokens)} tokens already, which "
                f"max_model_len={self.config.max_model_len} does not let go on; import it where that is larger"
            )
        request.restore(snapshot)
        self._residency.swapped_pages += request.swapped_pages
        self._residency.waiting.push(request)
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

    def _find(self, request_id: str) -> Request | None:
        return self._residency.running.get(request_id) or self._residency.waiting.get(request_id)

    # -- one step ------------------------------------------------------------------------------------------

    def plan(self) -> StepPlan | None:
        """The next step, or None if nothing is ready. Calls may run ahead of `apply`."""
        plan = self._draft
        for request in self._residency.admit(plan):
            self._resume(request)
        if self._packer.pace is not None:
            self._set_pace(self._packer.pace)
        self._short_of_pages = False
        lanes = self._order.take(self._allow)
        if lanes:
            self._choose_bucket(plan, lanes)
            self._add_spans(plan, lanes)
            for lane, _ in lanes:
                self._advance(lane)
        self._add_codas(plan)
        if not plan.rows and not plan.coda_slot:
            return None
        coda_rows = len(plan.coda_slot)
        if coda_rows:
            plan.coda_bucket = self._coda_ladder.bucket(coda_rows) if self._coda_ladder else coda_rows
        self._count(plan)
        self._draft = StepPlan(step_id=self.stats.steps)
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
                if task.depth == self.config.depths - 1:
                    self._residency.publish(request)
        updates: list[RequestUpdate] = []
        for row, task in enumerate(plan.coda_tasks):
            request = self._settle(task)
            if request is not None:
                updates.extend(self._apply_coda(plan, request, row, result.tokens[row]))
        return updates

    # -- planning ------------------------------------------------------------------------------------------

    def _resume(self, request: Request) -> None:
        """A request came to the device, new or in mid-life."""
        if request.scored < request.num_prompt_tokens - 1:
            self._scoring.append((request, request.generation))
        if request.held_depth >= 0:
            self._coda_due.append((request, request.generation, request.held_depth))
        self._order.resume(request)

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
        pace.codas = self._max_coda_rows if self._scoring else len(self._coda_due)

    def _choose_bucket(self, plan: StepPlan, lanes: Taken) -> None:
        plan.rows = rows = sum(count for _, count in lanes)
        if self._ladder is None:
            plan.bucket = rows
            return
        plan.bucket = self._assembly.bucket(rows) if self._assembly is not None else self._ladder.bucket(rows)
        if plan.bucket > rows:
            plan.padding_reason = self._why(lanes, rows, self._ladder)

    def _why(self, lanes: Taken, rows: int, ladder: Ladder) -> PaddingReason:
        """Why a step's bucket is larger than its rows. The depths of a cohort have the reason of its first."""
        if not self._order.chose:
            reason, before = self._last_padding
            return reason if rows == before else PaddingReason.COHORT
        reason = self._reason(lanes, rows, ladder)
        self._last_padding = reason, rows
        return reason

    def _reason(self, lanes: Taken, rows: int, ladder: Ladder) -> PaddingReason:
        if self._packer.paced:
            return PaddingReason.TARGET
        if self._short_of_pages:
            return PaddingReason.PAGES
        if rows == self._packer.budget:
            return PaddingReason.BUDGET
        if self._order.others_ready:
            return PaddingReason.KIND
        if any(count < ready_rows(lane) for lane, count in lanes):
            return PaddingReason.CHUNK
        if rows < ladder.sizes[0]:
            return PaddingReason.SMALLEST
        if self._assembly is None:
            return PaddingReason.FIFO
        return PaddingReason.DRAIN if self._packer.drains(lanes, rows) else PaddingReason.RATE

    def _add_spans(self, plan: StepPlan, lanes: Taken) -> None:
        """Append rows ``next .. next + count`` of each lane to the plan and move the lanes' frontiers.

        One loop over local names: this is what a step costs the host.
        """
        page_size, step_id, task_id = self.config.page_size, plan.step_id, self._tasks
        tasks, slots, starts, counts, depths = (
            plan.tasks,
            plan.span_slot,
            plan.span_start,
            plan.span_count,
            plan.span_depth,
        )
        for lane, count in lanes:
            request, depth, start = lane.request, lane.depth, lane.next
            slot, end = request.slot, start + count
            if depth == 0 and start < request.host_end:
                plan.token_slot.extend([slot] * count)
                plan.token_pos.extend(range(start, end))
                plan.token_id.extend(request.tokens[start:end])
            lane.next = end
            request.in_flight += 1
            task_id += 1
            tasks.append(
                ExecutionTask(
                    task_id,
                    step_id,
                    request.spec.request_id,
                    request.generation,
                    slot,
                    PROMPT if start < request.prefill_end else DECODE,
                    RECURRENT if depth else COMPOSITE_DEPTH0,
                    depth,
                    start,
                    count,
                    FULL_DEPTH if start < request.num_prompt_tokens else DECODE_DEPTH,
                    request.pages[start // page_size : (end - 1) // page_size + 1],
                )
            )
            slots.append(slot)
            starts.append(start)
            counts.append(count)
            depths.append(depth)
        self._tasks = task_id

    def _advance(self, lane: Lane) -> None:
        """Step boundary for one lane that ran: queue what it made ready (RFC "Dependency graph", transitions)."""
        request, depth = lane.request, lane.depth
        limit = lane.next
        if limit == request.known:
            first, last = request.exit_window()
            if first <= depth <= last:
                self._coda_due.append((request, request.generation, depth))
                request.held_depth = depth
                limit -= 1  # the newest position goes on once its coda row is planned, or its gate has decided
        if depth + 1 < len(request.lanes):
            request.lanes[depth + 1].limit = limit
            self._order.ready(request.lanes[depth + 1])
        self._order.ready(lane)

    def _count(self, plan: StepPlan) -> None:
        stats = self.stats
        stats.steps += 1
        stats.core_steps += plan.rows > 0
        stats.rows += plan.rows
        if plan.bucket > plan.rows:
            stats.padding_rows += plan.bucket - plan.rows
            stats.padding_reasons[plan.padding_reason] += plan.bucket - plan.rows
        stats.spans += len(plan.tasks)
        prompt_rows = sum(task.token_count for task in plan.tasks if task.kind is PROMPT)
        stats.prompt_rows += prompt_rows
        stats.prompt_steps += 0 < prompt_rows == plan.rows
        stats.decode_steps += 0 == prompt_rows < plan.rows
        if plan.coda_bucket:
            stats.coda_steps += 1
            stats.coda_rows += len(plan.coda_slot)
            stats.coda_padding_rows += plan.coda_bucket - len(plan.coda_slot)

    # -- coda ----------------------------------------------------------------------------------------------

    def _add_codas(self, plan: StepPlan) -> None:
        """Coda rows that are due: tokens first, then prompt positions to score with the room that is left."""
        room = self._max_coda_rows
        due, self._coda_due = self._coda_due, []
        for entry in due:
            request, generation, depth = entry
            if request.generation != generation or request.slot < 0 or request.held_depth != depth:
                continue
            if request.scored < request.num_prompt_tokens - 1 or not room:
                self._coda_due.append(entry)
                continue
            self._draw(plan, request, depth)
            room -= 1
        scoring, self._scoring = self._scoring, []
        for request, generation in scoring:
            if request.generation == generation and request.slot >= 0:
                room = self._score(plan, request, room)
                if request.scored < request.num_prompt_tokens - 1:
                    self._scoring.append((request, generation))

    def _score(self, plan: StepPlan, request: Request, room: int) -> int:
        """Score prompt positions that are through all depths and whose next token the device has."""
        first, last = request.lanes[0], request.lanes[-1]
        end = min(last.next, first.next - 1, request.num_prompt_tokens - 1, request.scored + room)
        for position in range(request.scored, end):
            self._add_coda(plan, request, position, last.depth, SCORE)
            request.scored += 1
            room -= 1
        return room

    def _draw(self, plan: StepPlan, request: Request, depth: int) -> None:
        """The newest position may leave at ``depth``: draw its next token, or let the gate decide."""
        action = REPLAY if request.replaying else SAMPLE
        if action is SAMPLE and depth < request.exit_window()[1]:
            action = GATE
        self._add_coda(plan, request, request.known - 1, depth, action)
        if request.rule.copy and depth + 1 < len(request.lanes):
            plan.coda_features |= COPY_KV
        if action is not GATE:
            self._leave(request, depth)

    def _add_coda(self, plan: StepPlan, request: Request, position: int, depth: int, action: CodaAction) -> None:
        self._tasks += 1
        request.in_flight += 1
        plan.coda_tasks.append(
            ExecutionTask(
                self._tasks,
                plan.step_id,
                request.spec.request_id,
                request.generation,
                request.slot,
                PROMPT if position < request.num_prompt_tokens else DECODE,
                CODA,
                depth,
                position,
                1,
                FULL_DEPTH if position < request.num_prompt_tokens else DECODE_DEPTH,
                [request.pages[position // self.config.page_size]],
            )
        )
        plan.coda_slot.append(request.slot)
        plan.coda_pos.append(position)
        plan.coda_depth.append(depth)
        plan.coda_action.append(action)
        plan.coda_features |= request.spec.coda_features

    def _leave(self, request: Request, depth: int) -> None:
        """The newest position leaves at ``depth``: its token is known to the device, the next one may start.

        Its own remaining depths follow as ordinary rows, or, under ``copy``, are done with.
        """
        position, request.known = request.known, request.known + 1
        if self._copies(request, depth):
            request.held_depth = -1
            for lane in request.lanes[depth + 1 :]:
                lane.next = lane.limit = position
        else:
            self._release_held(request)
        request.lanes[0].limit = request.known
        self._order.ready(request.lanes[0])

    def _copies(self, request: Request, depth: int) -> bool:
        return request.rule.copy and depth + 1 < len(request.lanes)

    def _release_held(self, request: Request) -> None:
        """Let the newest position go on to the depth after the one at which it was held."""
        depth, request.held_depth = request.held_depth, -1
        if depth + 1 < len(request.lanes):
            request.lanes[depth + 1].limit = request.lanes[depth].next
            self._order.ready(request.lanes[depth + 1])

    # -- results -------------------------------------------------------------------------------------------

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
                self._leave(request, task.depth)
            else:
                self._release_held(request)
        if left and self._copies(request, task.depth):
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
                self._end(request)
                return

    def _end(self, request: Request) -> None:
        """Release all a request holds; its queue entries turn stale and are skipped."""
        residency = self._residency
        del residency.live[request.generation]
        if request.slot >= 0:
            residency.leave(self._draft, request)
            return
        residency.waiting.remove(request)
        if request.swapped:
            residency.swapped_pages -= request.swapped_pages
            self._draft.swap_drop.append(request.generation)
