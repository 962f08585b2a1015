"""An independent judge of plans: re-derives each step's legality from the RFC's rules.

It sees only what passes between scheduler and executor (requests, plans, completions), never the scheduler's
own state, and keeps its own books: per request the depth that each position has reached, and who owns which
page and slot. Used by tests and by ``--check``.
"""

from collections import defaultdict
from typing import NoReturn

import numpy as np

from wavegraph.buckets.ladder import Ladder
from wavegraph.errors import EngineError
from wavegraph.scheduler.plan import ExecutionTask, Kind, Phase, RequestSpec, StepPlan, TaskState
from wavegraph.scheduler.scheduler import SchedulerConfig


class IllegalPlanError(EngineError):
    """A plan breaks a rule of the RFC; the message names the rule, the step and the task."""


class _Record:
    """What the checker knows of one live request."""

    def __init__(self, spec: RequestSpec, total_limit: int) -> None:
        self.prompt = spec.prompt_token_ids
        self.total_limit = total_limit
        self.known = len(self.prompt)
        self.reached = np.full(total_limit, -1, dtype=np.int16)  # deepest depth submitted at each position
        self.completed = np.full(total_limit, -1, dtype=np.int16)
        self.uploaded = np.zeros(total_limit, dtype=bool)
        self.pages: dict[int, int] = {}
        self.generation: int | None = None
        self.slot: int | None = None


class Checker:
    """Feed it `add`, `check` (each plan, in order), `complete` and `end`; it raises `IllegalPlanError`."""

    def __init__(
        self, config: SchedulerConfig, ladder: Ladder | None = None, coda_ladder: Ladder | None = None
    ) -> None:
        self._config = config
        self._ladder = ladder
        self._coda_ladder = coda_ladder
        self._live: dict[str, _Record] = {}
        self._last_generation = 0
        self._next_step = 0
        self._cohort: list[tuple[str, int, int, int]] = []

    def add(self, spec: RequestSpec) -> None:
        """A request was accepted by the scheduler."""
        total = min(len(spec.prompt_token_ids) + spec.max_tokens, self._config.max_model_len)
        self._live[spec.request_id] = _Record(spec, total)

    def end(self, request_id: str) -> None:
        """A request finished, failed or was cancelled: no later plan may hold it, its pages are free."""
        del self._live[request_id]

    def complete(self, plan: StepPlan) -> None:
        """``plan``'s results were applied."""
        for task in plan.tasks:
            record = self._live.get(task.request_id)
            if record is not None and record.generation == task.generation:
                done = record.completed[task.token_start : task.token_end]
                np.maximum(done, task.depth, out=done)  # results may come in any order

    def check_prefilled(self, request_id: str, num_prefilled_tokens: int) -> None:
        """The published prompt frontier may not pass a position that has not completed all depths."""
        record = self._live[request_id]
        done = record.completed[: len(record.prompt)] == self._config.depths - 1
        contiguous = len(done) if done.all() else int(np.argmin(done))
        if num_prefilled_tokens != contiguous:
            self._fail(
                f"num_prefilled_tokens is {num_prefilled_tokens}, but the completed prefix is {contiguous}",
                request_id,
            )

    def check(self, plan: StepPlan) -> None:
        """Judge one plan against everything planned before it, then take it as submitted."""
        if plan.step_id != self._next_step:
            self._fail(f"step ids must count up; expected {self._next_step}", plan)
        self._next_step += 1
        self._check_budgets(plan)
        self._check_device_lists(plan)
        for task in plan.tasks:
            self._check_owner(task)
        self._check_page_updates(plan)
        self._check_token_updates(plan)
        for key, tasks in self._by_request_and_depth(plan).items():
            self._check_dependencies(key, tasks)
        self._check_disjoint(plan)
        if not self._config.wavefront:
            self._check_atomic(plan)
        for task in plan.tasks:
            self._live[task.request_id].reached[task.token_start : task.token_end] = task.depth
        for task in plan.coda_tasks:
            self._check_coda(task)

    # -- rules ---------------------------------------------------------------------------------------------

    def _check_budgets(self, plan: StepPlan) -> None:
        config = self._config
        rows = sum(task.token_count for task in plan.tasks)
        if not plan.tasks or plan.rows != rows or rows > config.max_num_batched_tokens:
            self._fail(f"holds {rows} rows, says {plan.rows}, budget {config.max_num_batched_tokens}", plan)
        if len({task.request_id for task in plan.tasks}) > config.max_num_seqs:
            self._fail(f"holds more than max_num_seqs={config.max_num_seqs} requests", plan)
        expected = self._ladder.bucket(rows) if self._ladder else rows
        if plan.bucket < rows or (self._ladder and plan.bucket not in self._ladder.sizes) or plan.bucket < expected:
            self._fail(f"bucket {plan.bucket} does not hold {rows} rows or is not on the ladder", plan)
        coda = len(plan.coda_tasks)
        if plan.coda_bucket < coda or (coda and self._coda_ladder and plan.coda_bucket not in self._coda_ladder.sizes):
            self._fail(f"coda bucket {plan.coda_bucket} does not hold {coda} rows or is not on the ladder", plan)

    def _check_device_lists(self, plan: StepPlan) -> None:
        spans = list(zip(plan.span_slot, plan.span_start, plan.span_count, plan.span_depth, strict=True))
        if spans != [(t.slot, t.token_start, t.token_count, t.depth) for t in plan.tasks]:
            self._fail("what the device would run differs from the tasks", plan)
        if list(zip(plan.coda_slot, plan.coda_pos, strict=True)) != [(t.slot, t.token_start) for t in plan.coda_tasks]:
            self._fail("the device's coda rows differ from the coda tasks", plan)

    def _check_owner(self, task: ExecutionTask) -> None:
        record = self._live.get(task.request_id)
        if record is None:
            self._fail("works for a request that is not alive", task)
        if record.generation is None:
            if task.generation <= self._last_generation:
                self._fail("generations must grow", task)
            self._last_generation = record.generation = task.generation
            record.slot = task.slot
            others = {r.slot for r in self._live.values() if r is not record}
            if task.slot in others or not 0 <= task.slot < self._config.max_num_seqs:
                self._fail(f"slot {task.slot} is scratch, out of range or another request's", task)
        if (record.generation, record.slot) != (task.generation, task.slot):
            self._fail("generation or slot changed in mid-life", task)
        if not 0 <= task.depth < self._config.depths or task.token_count < 1 or task.token_start < 0:
            self._fail("depth or token range out of range", task)
        if task.token_end > record.known or task.token_count > self._config.prefill_chunk_size:
            self._fail(f"passes the {record.known} known tokens or the chunk size", task)
        prompt = task.token_end <= len(record.prompt)
        if (task.kind is Kind.PROMPT) != prompt or (task.phase is Phase.COMPOSITE_DEPTH0) != (task.depth == 0):
            self._fail("kind or phase does not fit the token range and depth", task)
        if task.state is not TaskState.SUBMITTED:
            self._fail("is not in state SUBMITTED", task)

    def _check_page_updates(self, plan: StepPlan) -> None:
        owners = {page: record for record in self._live.values() for page in record.pages.values()}
        slots = {record.slot: record for record in self._live.values() if record.slot is not None}
        for slot, index, page in zip(plan.page_slot, plan.page_index, plan.page_id, strict=True):
            record = slots.get(slot)
            if record is None or index in record.pages:
                self._fail(f"page update ({slot}, {index}, {page}) for no live request, or twice", plan)
            if page in owners or not 0 <= page < self._config.num_pages:
                self._fail(f"page {page} is scratch, out of range, or owned", plan)
            owners[page] = record
            record.pages[index] = page
        size = self._config.page_size
        for task in plan.tasks:
            record = self._live[task.request_id]
            blocks = range(task.token_start // size, (task.token_end - 1) // size + 1)
            if task.pages != [record.pages.get(block) for block in blocks]:
                self._fail(f"hidden handle {task.pages} is not the request's pages for its span", task)

    def _check_token_updates(self, plan: StepPlan) -> None:
        slots = {record.slot: record for record in self._live.values() if record.slot is not None}
        for slot, position, token in zip(plan.token_slot, plan.token_pos, plan.token_id, strict=True):
            record = slots.get(slot)
            if record is None or not 0 <= position < len(record.prompt) or record.prompt[position] != token:
                self._fail(f"token update ({slot}, {position}, {token}) is not a live request's prompt", plan)
            record.uploaded[position] = True
        for task in plan.tasks:
            record = self._live[task.request_id]
            if task.kind is Kind.PROMPT and not record.uploaded[task.token_start : task.token_end].all():
                self._fail("runs prompt tokens that the device does not have", task)

    def _by_request_and_depth(self, plan: StepPlan) -> dict[tuple[str, int], list[ExecutionTask]]:
        groups: dict[tuple[str, int], list[ExecutionTask]] = defaultdict(list)
        for task in plan.tasks:
            groups[task.request_id, task.depth].append(task)
        return groups

    def _check_dependencies(self, key: tuple[str, int], tasks: list[ExecutionTask]) -> None:
        """RFC "Dependency graph": hidden state of depth - 1 here, plane ``depth`` written for all before."""
        reached = self._live[key[0]].reached
        depth = key[1]
        for task in tasks:
            if (reached[task.token_start : task.token_end] != depth - 1).any():
                self._fail(f"its hidden rows are not those of depth {depth - 1}", task)
            missing = set(np.flatnonzero(reached[: task.token_start] < depth).tolist())
            for other in tasks:  # a layer writes the KV of all rows of a step before any row attends
                missing.difference_update(range(other.token_start, other.token_end))
            if missing:
                self._fail(f"plane {depth} is not written at position {min(missing)}", task)

    def _check_disjoint(self, plan: StepPlan) -> None:
        seen: dict[str, set[int]] = defaultdict(set)
        for task in plan.tasks:
            positions = set(range(task.token_start, task.token_end))
            if positions & seen[task.request_id]:
                self._fail("a position runs twice in one step", task)
            seen[task.request_id] |= positions

    def _check_atomic(self, plan: StepPlan) -> None:
        """Ordinary prefill: one kind and depth a step; depths of a cohort back to back, members only leave."""
        members = [(t.request_id, t.generation, t.token_start, t.token_count) for t in plan.tasks]
        depths, kinds = {t.depth for t in plan.tasks}, {t.kind for t in plan.tasks}
        if len(depths) != 1 or len(kinds) != 1:
            self._fail("mixes depths, or prompt and decode rows, although wavefront is off", plan)
        depth = depths.pop()
        alive = [m for m in self._cohort if m[0] in self._live and self._live[m[0]].generation == m[1]]
        if depth > 0 and members != alive:
            self._fail("is not the next depth of the running cohort", plan)
        if depth == 0 and any(self._live[m[0]].reached[m[2]] + 1 < self._config.depths for m in alive):
            self._fail("starts a cohort before the last one ended", plan)
        self._cohort = members

    def _check_coda(self, task: ExecutionTask) -> None:
        """CODA only when every known token is complete at all depths (RFC "Engine and scheduler update")."""
        record = self._live.get(task.request_id)
        if record is None or record.generation != task.generation or record.slot != task.slot:
            self._fail("samples for a request that is not alive", task)
        if task.token_start != record.known - 1 or (record.reached[: record.known] < self._config.depths - 1).any():
            self._fail("samples before all known tokens are complete at all depths", task)
        if record.known >= record.total_limit:
            self._fail("samples past the request's limit", task)
        record.known += 1

    def _fail(self, reason: str, subject: StepPlan | ExecutionTask | str) -> NoReturn:
        if isinstance(subject, ExecutionTask):
            where = (
                f"step {subject.step_id}, task {subject.task_id} of request {subject.request_id!r} (depth "
                f"{subject.depth}, tokens {subject.token_start}..{subject.token_end - 1})"
            )
        elif isinstance(subject, StepPlan):
            where = f"step {subject.step_id}"
        else:
            where = f"request {subject!r}"
        raise IllegalPlanError(f"{where}: {reason}")
