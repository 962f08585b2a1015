"""An independent judge of plans: re-derives each step's legality from the RFC's rules.

It sees only what passes between scheduler and executor (requests, plans, results), never the scheduler's own
state, and keeps its own books: per request the depth that each position has reached (`record`), and who owns which page
and slot. Used by tests and by ``--check``. `rules` judges what a plan runs; what a plan says of slots, pages and tokens
is entered into the books here, which refuse what does not fit.
"""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from wavegraph.buckets.cost import CostModel
from wavegraph.buckets.ladder import Ladder
from wavegraph.scheduler.config import SchedulerConfig
from wavegraph.scheduler.plan import CodaAction, ExecutionTask, RequestSpec, RequestUpdate, StepPlan
from wavegraph.scheduler.record import Record
from wavegraph.scheduler.request import RequestSnapshot
from wavegraph.scheduler.rules import Rules, illegal


class Checker:
    """Feed it `add`, `check` (each plan, in order), `complete`, `accept`, `end`; raises `IllegalPlanError`."""

    def __init__(
        self,
        config: SchedulerConfig,
        ladder: Ladder | None = None,
        coda_ladder: Ladder | None = None,
        cost: CostModel | None = None,
    ) -> None:
        self._config = config
        self._rules = Rules(config, ladder, coda_ladder, cost)
        self._live: dict[str, Record] = {}
        self._retained: dict[int, tuple[int, ...]] = {}  # page -> the prefix it was left with
        self._generations: set[int] = set()
        self._next_step = 0

    @property
    def live(self) -> list[str]:
        """Ids of the requests that have not ended."""
        return list(self._live)

    def add(self, spec: RequestSpec) -> None:
        """A request was accepted by the scheduler."""
        self._live[spec.request_id] = Record(spec, self._config)

    def adopt(self, snapshot: RequestSnapshot, generation: int) -> None:
        """A request in mid-life was imported; its pages are on the host."""
        record = Record(snapshot.spec, self._config)
        record.resume(snapshot, generation)
        self._live[snapshot.spec.request_id] = record
        if record.swapped is not None:
            self._generations.add(generation)

    def end(self, request_id: str) -> None:
        """A request finished, failed or was cancelled: no later plan may hold it, its pages are free."""
        self._retain(self._live.pop(request_id))

    def complete(self, plan: StepPlan, tokens: Sequence[int]) -> None:
        """``plan`` has run and drew ``tokens``, one per coda row, -1 for none."""
        for task in plan.tasks:
            record = self._owner(task)
            if record is not None:
                done = record.completed[task.token_start : task.token_end]
                np.maximum(done, task.depth, out=done)  # results may come in any order
        for task, action, token in zip(plan.coda_tasks, plan.coda_action, tokens, strict=True):
            record = self._owner(task)
            if record is None or action == CodaAction.SCORE:
                continue
            if action == CodaAction.GATE:
                record.gate = None
                if token >= 0:
                    record.leave(task)
            if record.copied[task.token_start]:
                record.completed[task.token_start] = self._config.depths - 1

    def accept(self, update: RequestUpdate) -> None:
        """The scheduler has published a token."""
        record = self._live[update.request_id]
        record.tokens.append(update.token_id)
        record.exits.append(update.exit_depth)

    def forget_prefixes(self) -> None:
        """Nothing that was computed so far may be shared with later requests."""
        self._retained.clear()
        for record in self._live.values():
            record.copied[:] = True

    def check_prefilled(self, request_id: str, num_prefilled_tokens: int) -> None:
        """The published prompt frontier may not pass a position that has not completed all depths."""
        record = self._live[request_id]
        if record.reached[0] < 0 and num_prefilled_tokens <= len(record.pages) * self._config.page_size:
            return  # a cached prefix, to be judged when the request first runs behind it
        done = record.completed[: record.prompt_len] == self._config.depths - 1
        contiguous = len(done) if done.all() else int(np.argmin(done))
        if num_prefilled_tokens > contiguous:
            illegal(f"num_prefilled_tokens {num_prefilled_tokens} passes the completed {contiguous}", request_id)

    def check(self, plan: StepPlan) -> None:
        """Judge one plan against everything planned before it, then take it as submitted."""
        if plan.step_id != self._next_step:
            illegal(f"step ids must count up; expected {self._next_step}", plan)
        self._next_step += 1
        rules, records = self._rules, self._live
        rules.check_budgets(plan)
        rules.check_device_lists(plan)
        self._take_departures(plan)
        self._take_arrivals(plan)
        self._take_page_updates(plan)
        self._take_token_updates(plan)
        groups: dict[tuple[str, int], list[ExecutionTask]] = defaultdict(list)
        for task in plan.tasks:
            record = rules.owner(records.get(task.request_id), task)
            rules.check_span(record, task)
            if task.depth == 0:
                self._take_hit(record, task)
                rules.check_tokens(record, task)
            groups[task.request_id, task.depth].append(task)
        for (request_id, depth), tasks in groups.items():
            rules.check_dependencies(records[request_id], depth, tasks)
        rules.check_disjoint(plan)
        rules.check_target(plan, records.values())
        rules.check_kinds(plan, records)
        for task in plan.tasks:
            records[task.request_id].reached[task.token_start : task.token_end] = task.depth
        for task, action in zip(plan.coda_tasks, plan.coda_action, strict=True):
            record = rules.owner(records.get(task.request_id), task)
            rules.check_coda(record, task, CodaAction(action))
            self._take_coda(record, task, CodaAction(action))

    def retract(self, plan: StepPlan) -> None:
        """``plan``, the newest, could not be launched: its requests are about to end; what came or left is undone.

        A page may have come for a request that has no row in the plan, since rows can be put back.
        """
        slots = {record.slot: record for record in self._live.values() if record.slot is not None}
        for slot, index in zip(reversed(plan.page_slot), reversed(plan.page_index), strict=True):
            if slot in slots:
                del slots[slot].pages[index:]
        swapped_in, swapped_out = dict(plan.swap_in), dict(plan.swap_out)
        for record in self._live.values():
            if record.generation in swapped_in:
                record.swapped, record.slot, record.pages = len(swapped_in[record.generation]), None, []
            elif (record.spec.request_id, record.generation) in plan.param_owner:
                record.slot, record.pages = None, []
            if record.generation in swapped_out:
                record.swapped, record.pages = None, swapped_out[record.generation]

    # -- what a plan tells of slots, pages and tokens ------------------------------------------------------

    def _take_departures(self, plan: StepPlan) -> None:
        for key, pages in plan.swap_out:
            record = self._by_generation(key)
            if record is not None:
                if record.pages != pages or record.swapped is not None:
                    illegal(f"swaps out {pages} of generation {key}, which holds {record.pages}", plan)
                if record.reached[0] < 0:
                    self._judge_prefix(record, len(pages), plan)
                self._retain(record)
                record.swapped, record.slot, record.pages = len(pages), None, []
        for key in plan.restarts:
            record = self._by_generation(key)
            if record is not None:
                self._retain(record)
                record.slot, record.swapped = None, None
                record.restart()

    def _take_arrivals(self, plan: StepPlan) -> None:
        swapped_in = dict(plan.swap_in)
        for slot, (request_id, generation) in zip(plan.param_slot, plan.param_owner, strict=True):
            record = self._live.get(request_id)
            if record is None or record.slot is not None:
                illegal(f"request {request_id!r} comes to slot {slot} but is not waiting", plan)
            taken = {other.slot for other in self._live.values()}
            if slot in taken or not 0 <= slot < self._config.max_num_seqs:
                illegal(f"slot {slot} is scratch, out of range or another request's", plan)
            record.slot = slot
            record.uploaded[:] = False
            if record.swapped is not None:
                if generation != record.generation or len(swapped_in.get(generation, [])) != record.swapped:
                    illegal(f"request {request_id!r} comes back without its {record.swapped} pages", plan)
                record.swapped, record.host_end = None, len(record.tokens)
            elif generation != record.generation:
                if generation in self._generations:
                    illegal(f"generation {generation} was used before", plan)
                self._generations.add(generation)
                record.generation = generation
                record.restart()

    def _take_page_updates(self, plan: StepPlan) -> None:
        slots = {record.slot: record for record in self._live.values() if record.slot is not None}
        size = self._config.page_size
        for slot, index, page in zip(plan.page_slot, plan.page_index, plan.page_id, strict=True):
            record = slots.get(slot)
            if record is None or index != len(record.pages):
                illegal(f"page update ({slot}, {index}, {page}) for no live request, or out of order", plan)
            if not 0 <= page < self._config.num_pages:
                illegal(f"page {page} is scratch or out of range", plan)
            owners = [other for other in self._live.values() if page in other.pages]
            if owners and not self._holds_prefix(page, record.prefix(index + 1, size), owners):
                illegal(f"page {page} belongs to another request and does not hold this one's prefix", plan)
            record.pages.append(page)
        fresh = {task.pages[0] for task in plan.tasks if task.depth == 0 and task.token_start % size == 0}
        for page in fresh:
            self._retained.pop(page, None)

    def _take_token_updates(self, plan: StepPlan) -> None:
        slots = {record.slot: record for record in self._live.values() if record.slot is not None}
        for slot, position, token in zip(plan.token_slot, plan.token_pos, plan.token_id, strict=True):
            record = slots.get(slot)
            if record is None or not 0 <= position < record.host_end or record.tokens[position] != token:
                illegal(f"token update ({slot}, {position}, {token}) is not a live request's token", plan)
            record.uploaded[position] = True

    def _take_hit(self, record: Record, task: ExecutionTask) -> None:
        """A request whose first row is not its first position must have got a finished prefix."""
        start, size = task.token_start, self._config.page_size
        if not start or record.reached[0] >= 0:
            return
        if start % size or start >= record.known:
            illegal("starts behind a prefix that is not whole pages or leaves it nothing to run", task)
        self._judge_prefix(record, start // size, task)

    def _judge_prefix(self, record: Record, pages: int, subject: StepPlan | ExecutionTask) -> None:
        """The first ``pages`` pages of a request that has run nothing must hold its prefix, finished."""
        size = self._config.page_size
        for index, page in enumerate(record.pages[:pages]):
            owners = [other for other in self._live.values() if other is not record and page in other.pages]
            if not self._holds_prefix(page, record.prefix(index + 1, size), owners):
                illegal(f"page {page} does not hold the finished prefix of {record.spec.request_id!r}", subject)
        record.reached[: pages * size] = record.completed[: pages * size] = self._config.depths - 1

    def _holds_prefix(self, page: int, prefix: tuple[int, ...], owners: list[Record]) -> bool:
        size = self._config.page_size
        if not self._config.prefix_cache or len(prefix) % size:
            return False
        count = len(prefix) // size
        for owner in owners:
            same = owner.pages.index(page) == count - 1 and owner.prefix(count, size) == prefix
            if same and owner.finished_pages(size) >= count:  # others may share it and have run nothing yet
                return True
        return self._retained.get(page) == prefix

    def _take_coda(self, record: Record, task: ExecutionTask, action: CodaAction) -> None:
        """A legal coda row counts as submitted."""
        if action is CodaAction.SCORE:
            record.scored[task.token_start] = True
        elif action is CodaAction.GATE:
            record.gate = (task.token_start, task.depth)
        else:
            record.leave(task)

    # -- books ---------------------------------------------------------------------------------------------

    def _by_generation(self, generation: int) -> Record | None:
        return next((r for r in self._live.values() if r.generation == generation), None)

    def _owner(self, task: ExecutionTask) -> Record | None:
        record = self._live.get(task.request_id)
        return record if record is not None and record.generation == task.generation else None

    def _retain(self, record: Record) -> None:
        """Its finished pages keep their content until somebody writes them."""
        size = self._config.page_size
        for index in range(min(record.finished_pages(size), len(record.pages))):
            self._retained[record.pages[index]] = record.prefix(index + 1, size)
