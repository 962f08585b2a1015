"""An independent judge of plans: re-derives each step's legality from the RFC's rules.

It sees only what passes between scheduler and executor (requests, plans, results), never the scheduler's own
state, and keeps its own books: per request the depth that each position has reached, and who owns which page and
slot. Used by tests and by ``--check``.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import NoReturn

import numpy as np

from wavegraph.buckets.cost import CostModel
from wavegraph.buckets.ladder import Ladder
from wavegraph.errors import EngineError
from wavegraph.scheduler.config import SchedulerConfig
from wavegraph.scheduler.packing import AUTO_TURN, PATIENCE
from wavegraph.scheduler.plan import (
    CodaAction,
    ExecutionTask,
    ExitRule,
    Kind,
    Phase,
    RequestSpec,
    RequestUpdate,
    StepPlan,
    TaskState,
)
from wavegraph.scheduler.request import RequestSnapshot


class IllegalPlanError(EngineError):
    """A plan breaks a rule of the RFC; the message names the rule, the step and the task."""


class _Record:
    """What the checker knows of one live request."""

    def __init__(self, spec: RequestSpec, config: SchedulerConfig) -> None:
        self.spec = spec
        self.depths = config.depths
        self.rule = spec.exit_rule or ExitRule(config.depths - 1)
        self.prompt_len = len(spec.prompt_token_ids)
        self.tokens = list(spec.prompt_token_ids)
        self.exits: list[int] = []
        self.total_limit = min(self.prompt_len + spec.max_tokens, config.max_model_len)
        self.generation = 0
        self.slot: int | None = None
        self.swapped: int | None = None
        self.pages: list[int] = []
        self.restart()

    def restart(self) -> None:
        """Nothing of it is on the device."""
        size = self.total_limit
        copied = self.rule.copy and len(self.tokens) > self.prompt_len
        self.prefill_end = self.prompt_len if copied else len(self.tokens)
        self.host_end = len(self.tokens)
        self.known = self.prefill_end
        self.reached = np.full(size, -1, dtype=np.int16)  # deepest depth submitted at each position
        self.completed = np.full(size, -1, dtype=np.int16)
        self.copied = np.zeros(size, dtype=bool)
        self.uploaded = np.zeros(size, dtype=bool)
        self.scored = np.zeros(size, dtype=bool)
        self.gate: tuple[int, int] | None = None
        self.pages = []

    def prefix(self, pages: int, page_size: int) -> tuple[int, ...]:
        """Tokens of the first ``pages`` pages."""
        return tuple(self.tokens[: pages * page_size])

    def finished_pages(self, page_size: int) -> int:
        """Pages complete at every depth, of accepted tokens, with no copied exit among them."""
        end = min(self.total_limit, len(self.tokens))
        good = (self.completed[:end] == self.depths - 1) & ~self.copied[:end]
        return (end if good.all() else int(np.argmin(good))) // page_size


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
        self._cost = cost
        self._without_prompt = 0  # steps in a row that ran no prompt row
        self._ladder = ladder
        self._coda_ladder = coda_ladder
        self._live: dict[str, _Record] = {}
        self._retained: dict[int, tuple[int, ...]] = {}  # page -> the prefix it was left with
        self._generations: set[int] = set()
        self._next_step = 0
        self._cohort: list[tuple[str, int, int, int]] = []

    @property
    def live(self) -> list[str]:
        """Ids of the requests that have not ended."""
        return list(self._live)

    def add(self, spec: RequestSpec) -> None:
        """A request was accepted by the scheduler."""
        self._live[spec.request_id] = _Record(spec, self._config)

    def adopt(self, snapshot: RequestSnapshot, generation: int) -> None:
        """A request in mid-life was imported; its pages are on the host."""
        record = _Record(snapshot.spec, self._config)
        record.tokens, record.exits = list(snapshot.tokens), list(snapshot.exits)
        record.restart()
        self._live[snapshot.spec.request_id] = record
        if not snapshot.pages:
            return
        record.generation, record.swapped = generation, len(snapshot.pages)
        self._generations.add(generation)
        record.known, record.prefill_end = snapshot.known, snapshot.prefill_end
        for depth, (submitted, done) in enumerate(zip(snapshot.frontier, snapshot.completed, strict=True)):
            record.reached[:submitted] = depth
            record.completed[:done] = depth
        record.copied[record.prompt_len :] = record.rule.copy
        record.scored[: snapshot.scored] = True

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
                    self._leave(record, task)
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
            self._fail(f"num_prefilled_tokens {num_prefilled_tokens} passes the completed {contiguous}", request_id)

    def check(self, plan: StepPlan) -> None:
        """Judge one plan against everything planned before it, then take it as submitted."""
        if plan.step_id != self._next_step:
            self._fail(f"step ids must count up; expected {self._next_step}", plan)
        self._next_step += 1
        self._check_budgets(plan)
        self._check_device_lists(plan)
        self._take_departures(plan)
        self._take_arrivals(plan)
        self._take_page_updates(plan)
        self._take_token_updates(plan)
        for task in plan.tasks:
            self._check_owner(task)
            self._check_span(task)
        for key, tasks in self._by_request_and_depth(plan).items():
            self._check_dependencies(key, tasks)
        self._check_disjoint(plan)
        self._check_target(plan)
        if not self._config.wavefront:
            self._check_atomic(plan)
        elif not self._config.fused and len({task.kind for task in plan.tasks}) > 1:
            self._fail("mixes prompt and decode rows, although steps are separate", plan)
        for task in plan.tasks:
            self._live[task.request_id].reached[task.token_start : task.token_end] = task.depth
        for task, action in zip(plan.coda_tasks, plan.coda_action, strict=True):
            self._check_owner(task)
            self._check_coda(task, CodaAction(action))

    def retract(self, plan: StepPlan) -> None:
        """``plan``, the newest, could not be launched: its requests are about to end; who came or left is undone."""
        swapped_in, swapped_out = dict(plan.swap_in), dict(plan.swap_out)
        for record in self._live.values():
            if record.generation in swapped_in:
                record.swapped, record.slot, record.pages = len(swapped_in[record.generation]), None, []
            elif (record.spec.request_id, record.generation) in plan.param_owner:
                record.slot, record.pages = None, []
            if record.generation in swapped_out:
                record.swapped, record.pages = None, swapped_out[record.generation]

    # -- rules ---------------------------------------------------------------------------------------------

    def _check_budgets(self, plan: StepPlan) -> None:
        config = self._config
        rows = sum(task.token_count for task in plan.tasks)
        coda = len(plan.coda_tasks)
        if not rows + coda or plan.rows != rows or rows > config.max_num_batched_tokens:
            self._fail(f"holds {rows} rows, says {plan.rows}, budget {config.max_num_batched_tokens}", plan)
        if len({task.request_id for task in plan.tasks}) > config.max_num_seqs:
            self._fail(f"holds more than max_num_seqs={config.max_num_seqs} requests", plan)
        if coda > config.coda_row_limit:
            self._fail(f"holds {coda} coda rows, over the limit", plan)
        for name, ladder, bucket, count in (
            ("bucket", self._ladder, plan.bucket, rows),
            ("coda bucket", self._coda_ladder, plan.coda_bucket, coda),
        ):
            if bucket < count or (count and ladder and bucket not in ladder.sizes) or (not count and bucket):
                self._fail(f"{name} {bucket} does not hold {count} rows or is not on the ladder", plan)

    def _check_device_lists(self, plan: StepPlan) -> None:
        spans = list(zip(plan.span_slot, plan.span_start, plan.span_count, plan.span_depth, strict=True))
        if spans != [(t.slot, t.token_start, t.token_count, t.depth) for t in plan.tasks]:
            self._fail("what the device would run differs from the tasks", plan)
        codas = list(zip(plan.coda_slot, plan.coda_pos, plan.coda_depth, strict=True))
        if codas != [(t.slot, t.token_start, t.depth) for t in plan.coda_tasks]:
            self._fail("the device's coda rows differ from the coda tasks", plan)

    def _take_departures(self, plan: StepPlan) -> None:
        left = {key for key, _ in plan.swap_out} | set(plan.restarts)
        self._cohort = [member for member in self._cohort if member[1] not in left]
        for key, pages in plan.swap_out:
            record = self._by_generation(key)
            if record is not None:
                if record.pages != pages or record.swapped is not None:
                    self._fail(f"swaps out {pages} of generation {key}, which holds {record.pages}", plan)
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
                self._fail(f"request {request_id!r} comes to slot {slot} but is not waiting", plan)
            taken = {other.slot for other in self._live.values()}
            if slot in taken or not 0 <= slot < self._config.max_num_seqs:
                self._fail(f"slot {slot} is scratch, out of range or another request's", plan)
            record.slot = slot
            record.uploaded[:] = False
            if record.swapped is not None:
                if generation != record.generation or len(swapped_in.get(generation, [])) != record.swapped:
                    self._fail(f"request {request_id!r} comes back without its {record.swapped} pages", plan)
                record.swapped, record.host_end = None, len(record.tokens)
            elif generation != record.generation:
                if generation in self._generations:
                    self._fail(f"generation {generation} was used before", plan)
                self._generations.add(generation)
                record.generation = generation
                record.restart()

    def _take_page_updates(self, plan: StepPlan) -> None:
        slots = {record.slot: record for record in self._live.values() if record.slot is not None}
        size = self._config.page_size
        for slot, index, page in zip(plan.page_slot, plan.page_index, plan.page_id, strict=True):
            record = slots.get(slot)
            if record is None or index != len(record.pages):
                self._fail(f"page update ({slot}, {index}, {page}) for no live request, or out of order", plan)
            if not 0 <= page < self._config.num_pages:
                self._fail(f"page {page} is scratch or out of range", plan)
            owners = [other for other in self._live.values() if page in other.pages]
            if owners and not self._holds_prefix(page, record.prefix(index + 1, size), owners):
                self._fail(f"page {page} belongs to another request and does not hold this one's prefix", plan)
            record.pages.append(page)
        fresh = {task.pages[0] for task in plan.tasks if task.depth == 0 and task.token_start % size == 0}
        for page in fresh:
            self._retained.pop(page, None)

    def _take_token_updates(self, plan: StepPlan) -> None:
        slots = {record.slot: record for record in self._live.values() if record.slot is not None}
        for slot, position, token in zip(plan.token_slot, plan.token_pos, plan.token_id, strict=True):
            record = slots.get(slot)
            if record is None or not 0 <= position < record.host_end or record.tokens[position] != token:
                self._fail(f"token update ({slot}, {position}, {token}) is not a live request's token", plan)
            record.uploaded[position] = True

    def _check_owner(self, task: ExecutionTask) -> None:
        record = self._live.get(task.request_id)
        if record is None or record.slot is None:
            self._fail("works for a request that is not alive on the device", task)
        if (record.generation, record.slot) != (task.generation, task.slot):
            self._fail("generation or slot is not the request's", task)
        if task.state is not TaskState.SUBMITTED:
            self._fail("is not in state SUBMITTED", task)
        size = self._config.page_size
        blocks = record.pages[task.token_start // size : (task.token_end - 1) // size + 1]
        if task.pages != blocks or len(record.pages) * size < task.token_end:
            self._fail(f"hidden handle {task.pages} is not the request's pages for its span, {blocks}", task)

    def _check_span(self, task: ExecutionTask) -> None:
        record = self._live[task.request_id]
        start, end = task.token_start, task.token_end
        if not 0 <= task.depth < self._config.depths or task.token_count < 1 or start < 0:
            self._fail("depth or token range out of range", task)
        chunk = self._config.prefill_chunk_size
        if end > record.known or (chunk is not None and task.token_count > chunk):
            self._fail(f"passes the {record.known} known tokens or the chunk size", task)
        prompt = end <= record.prefill_end
        if (task.kind is Kind.PROMPT) != prompt or (task.phase is Phase.COMPOSITE_DEPTH0) != (task.depth == 0):
            self._fail("kind or phase does not fit the token range and depth", task)
        if task.depth == 0:
            self._take_hit(task, record)
            if not record.uploaded[start:end].all():
                self._fail("runs tokens that the slot's table does not have", task)

    def _take_hit(self, task: ExecutionTask, record: _Record) -> None:
        """A request whose first row is not its first position must have got a finished prefix."""
        start, size = task.token_start, self._config.page_size
        if not start or record.reached[0] >= 0:
            return
        if start % size or start >= record.known:
            self._fail("starts behind a prefix that is not whole pages or leaves it nothing to run", task)
        self._judge_prefix(record, start // size, task)

    def _judge_prefix(self, record: _Record, pages: int, subject: StepPlan | ExecutionTask) -> None:
        """The first ``pages`` pages of a request that has run nothing must hold its prefix, finished."""
        size = self._config.page_size
        for index, page in enumerate(record.pages[:pages]):
            owners = [other for other in self._live.values() if other is not record and page in other.pages]
            if not self._holds_prefix(page, record.prefix(index + 1, size), owners):
                self._fail(f"page {page} does not hold the finished prefix of {record.spec.request_id!r}", subject)
        record.reached[: pages * size] = record.completed[: pages * size] = self._config.depths - 1

    def _holds_prefix(self, page: int, prefix: tuple[int, ...], owners: list[_Record]) -> bool:
        size = self._config.page_size
        if not self._config.prefix_cache or len(prefix) % size:
            return False
        count = len(prefix) // size
        for owner in owners:
            same = owner.pages.index(page) == count - 1 and owner.prefix(count, size) == prefix
            if same and owner.finished_pages(size) >= count:  # others may share it and have run nothing yet
                return True
        return self._retained.get(page) == prefix

    def _by_request_and_depth(self, plan: StepPlan) -> dict[tuple[str, int], list[ExecutionTask]]:
        groups: dict[tuple[str, int], list[ExecutionTask]] = defaultdict(list)
        for task in plan.tasks:
            groups[task.request_id, task.depth].append(task)
        return groups

    def _check_dependencies(self, key: tuple[str, int], tasks: list[ExecutionTask]) -> None:
        """RFC "Dependency graph": hidden state of depth - 1 here, plane ``depth`` written for all before."""
        record, depth = self._live[key[0]], key[1]
        for task in tasks:
            if (record.reached[task.token_start : task.token_end] != depth - 1).any():
                self._fail(f"its hidden rows are not those of depth {depth - 1}", task)
            missing = set(np.flatnonzero(record.reached[: task.token_start] < depth).tolist())
            for other in tasks:  # a layer writes the KV of all rows of a step before any row attends
                missing.difference_update(range(other.token_start, other.token_end))
            if missing:
                self._fail(f"plane {depth} is not written at position {min(missing)}", task)
            if record.gate is not None and task.token_start <= record.gate[0] < task.token_end:
                self._fail("runs a position on whose gate has not decided yet", task)

    def _check_disjoint(self, plan: StepPlan) -> None:
        seen: dict[str, set[int]] = defaultdict(set)
        for task in plan.tasks:
            positions = set(range(task.token_start, task.token_end))
            if positions & seen[task.request_id]:
                self._fail("a position runs twice in one step", task)
            seen[task.request_id] |= positions

    def _check_target(self, plan: StepPlan) -> None:
        """While decodes are live, prompt rows may not take a step's predicted seconds past the target, with exceptions.

        A step without decode rows runs a turn of prompt rows at least, and so does one after `PATIENCE` without any. An
        atomic plan is bounded at its first depth.
        """
        target, chunk = self._config.target_step_seconds, self._config.prefill_chunk_size
        rows = {kind: sum(t.token_count for t in plan.tasks if t.kind is kind) for kind in Kind}
        waited = self._without_prompt
        if plan.rows:
            self._without_prompt = 0 if rows[Kind.PROMPT] else waited + 1
        live = any(r.slot is not None and r.prefill_end < r.known < r.total_limit for r in self._live.values())
        follows = not self._config.wavefront and any(task.depth for task in plan.tasks)
        if target is None or not live or not rows[Kind.PROMPT] or follows:
            return
        assert self._cost is not None
        positions = sum(p + 1 for t in plan.tasks for p in range(t.token_start, t.token_end))
        seconds = self._cost.step_seconds(plan.bucket, positions, plan.coda_bucket)
        if seconds <= target * (1 + 1e-9):
            return
        if rows[Kind.PROMPT] > (chunk or AUTO_TURN) or (rows[Kind.DECODE] and waited < PATIENCE):
            self._fail(f"takes {seconds:.4g} s by prediction, past the target of {target:.4g} s", plan)

    def _check_atomic(self, plan: StepPlan) -> None:
        """Ordinary prefill: one kind and depth a step; depths of a cohort back to back, members only leave."""
        if not plan.tasks:
            return
        members = [(t.request_id, t.generation, t.token_start, t.token_count) for t in plan.tasks]
        depths, kinds = {t.depth for t in plan.tasks}, {t.kind for t in plan.tasks}
        if len(depths) != 1 or len(kinds) != 1:
            self._fail("mixes depths, or prompt and decode rows, although wavefront is off", plan)
        depth = depths.pop()
        unfinished = [m for m in self._cohort if self._unfinished(m)]
        # A request that came in the middle of its depths catches up alone, in as many spans as that takes.
        alone = len(members) == 1 and all(member[:2] == members[0][:2] for member in unfinished)
        if depth > 0 and members != unfinished and not alone:
            self._fail("is not the next depth of the running cohort", plan)
        if depth == 0 and unfinished:
            self._fail("starts a cohort before the last one ended", plan)
        self._cohort = members

    def _unfinished(self, member: tuple[str, int, int, int]) -> bool:
        record = self._live.get(member[0])
        if record is None or record.generation != member[1] or record.slot is None:
            return False
        return bool(record.reached[member[2]] + 1 < self._config.depths)

    def _check_coda(self, task: ExecutionTask, action: CodaAction) -> None:
        """CODA only for the newest position, at a depth where it may leave, with all before it done that deep."""
        record, position, depth = self._live[task.request_id], task.token_start, task.depth
        last = self._config.depths - 1
        if action is CodaAction.SCORE:
            if not record.spec.score_prompt or position >= record.prompt_len - 1 or record.scored[position]:
                self._fail("scores a position that is not to be scored, or twice", task)
            if record.reached[position] != last or depth != last:
                self._fail("scores a position before its last depth", task)
            if not record.uploaded[position + 1]:
                self._fail("scores a token that the device does not have", task)
            record.scored[position] = True
            return
        if position != record.known - 1 or record.reached[position] != depth or record.gate is not None:
            self._fail("samples a position whose hidden row is not there", task)
        if (record.reached[:position] < depth).any() or record.known >= record.total_limit:
            self._fail("samples before all known tokens are complete at this depth, or past the limit", task)
        if action is not self._expected_action(record, depth):
            self._fail(f"may not {action.name} at depth {depth}", task)
        if action is CodaAction.GATE:
            record.gate = (position, depth)
        else:
            self._leave(record, task)

    def _expected_action(self, record: _Record, depth: int) -> CodaAction | None:
        rule, last = record.rule, self._config.depths - 1
        if record.known < len(record.tokens):
            replayed = record.exits[record.known - record.prompt_len]
            return CodaAction.REPLAY if depth == replayed else None
        if rule.copy and record.known == record.prompt_len:
            return CodaAction.SAMPLE if depth == last else None
        if depth == rule.max_depth:
            return CodaAction.SAMPLE
        return CodaAction.GATE if rule.gated and rule.min_depth <= depth < rule.max_depth else None

    def _leave(self, record: _Record, task: ExecutionTask) -> None:
        if record.known < record.total_limit and record.slot == task.slot and record.known >= len(record.tokens):
            record.uploaded[record.known] = True  # CODA has put the token into the slot's table
        record.known += 1
        if record.rule.copy and task.depth < self._config.depths - 1:
            record.reached[task.token_start] = self._config.depths - 1
            record.copied[task.token_start] = True

    # -- books ---------------------------------------------------------------------------------------------

    def _by_generation(self, generation: int) -> _Record | None:
        return next((r for r in self._live.values() if r.generation == generation), None)

    def _owner(self, task: ExecutionTask) -> _Record | None:
        record = self._live.get(task.request_id)
        return record if record is not None and record.generation == task.generation else None

    def _retain(self, record: _Record) -> None:
        """Its finished pages keep their content until somebody writes them."""
        size = self._config.page_size
        for index in range(min(record.finished_pages(size), len(record.pages))):
            self._retained[record.pages[index]] = record.prefix(index + 1, size)

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
