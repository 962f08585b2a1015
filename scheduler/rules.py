"""The rules of the RFC by which a plan is legal. They look at records and change none; `checker` keeps those."""

from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import NoReturn

import numpy as np

from wavegraph.buckets.cost import CostModel
from wavegraph.buckets.ladder import Ladder
from wavegraph.errors import EngineError
from wavegraph.scheduler.config import SchedulerConfig
from wavegraph.scheduler.packing import AUTO_TURN, PATIENCE
from wavegraph.scheduler.plan import CodaAction, ExecutionTask, Kind, Phase, StepPlan, TaskState
from wavegraph.scheduler.record import Record


class IllegalPlanError(EngineError):
    """A plan breaks a rule of the RFC; the message names the rule, the step and the task."""


def illegal(reason: str, subject: StepPlan | ExecutionTask | str) -> NoReturn:
    """Raise `IllegalPlanError` about a plan, a task or the request of an id."""
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


class Rules:
    """One method a rule; each raises `IllegalPlanError`. Of the plans before, the rules remember what they bound.

    ``records`` are those of the live requests by id, as they stand before the plan's rows count.
    """

    def __init__(
        self, config: SchedulerConfig, ladder: Ladder | None, coda_ladder: Ladder | None, cost: CostModel | None
    ) -> None:
        self._config = config
        self._cost = cost
        self._ladder = ladder
        self._coda_ladder = coda_ladder
        self._without_prompt = 0  # steps in a row that ran no prompt row
        self._cohort: list[tuple[str, int, int, int]] = []

    # -- a plan by itself ----------------------------------------------------------------------------------

    def check_budgets(self, plan: StepPlan) -> None:
        """Rows, coda rows and requests are within the limits, and the buckets hold them."""
        config = self._config
        rows = sum(task.token_count for task in plan.tasks)
        coda = len(plan.coda_tasks)
        if not rows + coda or plan.rows != rows or rows > config.max_num_batched_tokens:
            illegal(f"holds {rows} rows, says {plan.rows}, budget {config.max_num_batched_tokens}", plan)
        if len({task.request_id for task in plan.tasks}) > config.max_num_seqs:
            illegal(f"holds more than max_num_seqs={config.max_num_seqs} requests", plan)
        if coda > config.coda_row_limit:
            illegal(f"holds {coda} coda rows, over the limit", plan)
        for name, ladder, bucket, count in (
            ("bucket", self._ladder, plan.bucket, rows),
            ("coda bucket", self._coda_ladder, plan.coda_bucket, coda),
        ):
            if bucket < count or (count and ladder and bucket not in ladder.sizes) or (not count and bucket):
                illegal(f"{name} {bucket} does not hold {count} rows or is not on the ladder", plan)

    def check_device_lists(self, plan: StepPlan) -> None:
        """The device gets what the tasks say."""
        spans = list(zip(plan.span_slot, plan.span_start, plan.span_count, plan.span_depth, strict=True))
        if spans != [(t.slot, t.token_start, t.token_count, t.depth) for t in plan.tasks]:
            illegal("what the device would run differs from the tasks", plan)
        codas = list(zip(plan.coda_slot, plan.coda_pos, plan.coda_depth, strict=True))
        if codas != [(t.slot, t.token_start, t.depth) for t in plan.coda_tasks]:
            illegal("the device's coda rows differ from the coda tasks", plan)

    def check_disjoint(self, plan: StepPlan) -> None:
        """No position runs at two depths in one step."""
        seen: dict[str, set[int]] = defaultdict(set)
        for task in plan.tasks:
            positions = set(range(task.token_start, task.token_end))
            if positions & seen[task.request_id]:
                illegal("a position runs twice in one step", task)
            seen[task.request_id] |= positions

    # -- a plan among others -------------------------------------------------------------------------------

    def check_target(self, plan: StepPlan, records: Collection[Record]) -> None:
        """While decodes are live, prompt rows may not take a step's predicted seconds past the target, with exceptions.

        A step without decode rows runs a turn of prompt rows at least, and so does one after `PATIENCE` without any. An
        atomic plan is bounded at its first depth.
        """
        target, chunk = self._config.target_step_seconds, self._config.prefill_chunk_size
        rows = {kind: sum(t.token_count for t in plan.tasks if t.kind is kind) for kind in Kind}
        waited = self._without_prompt
        if plan.rows:
            self._without_prompt = 0 if rows[Kind.PROMPT] else waited + 1
        live = any(r.slot is not None and r.prefill_end < r.known < r.total_limit for r in records)
        follows = not self._config.wavefront and any(task.depth for task in plan.tasks)
        if target is None or not live or not rows[Kind.PROMPT] or follows:
            return
        assert self._cost is not None
        positions = sum(p + 1 for t in plan.tasks for p in range(t.token_start, t.token_end))
        seconds = self._cost.step_seconds(plan.bucket, positions, plan.coda_bucket)
        if seconds <= target * (1 + 1e-9):
            return
        if rows[Kind.PROMPT] > (chunk or AUTO_TURN) or (rows[Kind.DECODE] and waited < PATIENCE):
            illegal(f"takes {seconds:.4g} s by prediction, past the target of {target:.4g} s", plan)

    def check_kinds(self, plan: StepPlan, records: Mapping[str, Record]) -> None:
        """Prompt and decode rows share a step only if it may be fused; ordinary prefill is atomic."""
        if not self._config.wavefront:
            self._check_atomic(plan, records)
        elif not self._config.fused and len({task.kind for task in plan.tasks}) > 1:
            illegal("mixes prompt and decode rows, although steps are separate", plan)

    def _check_atomic(self, plan: StepPlan, records: Mapping[str, Record]) -> None:
        """Ordinary prefill: one kind and depth a step; depths of a cohort back to back, members only leave."""
        left = {key for key, _ in plan.swap_out} | set(plan.restarts)
        self._cohort = [member for member in self._cohort if member[1] not in left]
        if not plan.tasks:
            return
        members = [(t.request_id, t.generation, t.token_start, t.token_count) for t in plan.tasks]
        depths, kinds = {t.depth for t in plan.tasks}, {t.kind for t in plan.tasks}
        if len(depths) != 1 or len(kinds) != 1:
            illegal("mixes depths, or prompt and decode rows, although wavefront is off", plan)
        depth = depths.pop()
        unfinished = [m for m in self._cohort if self._unfinished(m, records.get(m[0]))]
        # A request that came in the middle of its depths catches up alone, in as many spans as that takes.
        alone = len(members) == 1 and all(member[:2] == members[0][:2] for member in unfinished)
        if depth > 0 and members != unfinished and not alone:
            illegal("is not the next depth of the running cohort", plan)
        if depth == 0 and unfinished:
            illegal("starts a cohort before the last one ended", plan)
        self._cohort = members

    def _unfinished(self, member: tuple[str, int, int, int], record: Record | None) -> bool:
        if record is None or record.generation != member[1] or record.slot is None:
            return False
        return bool(record.reached[member[2]] + 1 < self._config.depths)

    # -- tasks ---------------------------------------------------------------------------------------------

    def owner(self, record: Record | None, task: ExecutionTask) -> Record:
        """The record of the request that a task works for, which is on the device and has the pages."""
        if record is None or record.slot is None:
            illegal("works for a request that is not alive on the device", task)
        if (record.generation, record.slot) != (task.generation, task.slot):
            illegal("generation or slot is not the request's", task)
        if task.state is not TaskState.SUBMITTED:
            illegal("is not in state SUBMITTED", task)
        size = self._config.page_size
        blocks = record.pages[task.token_start // size : (task.token_end - 1) // size + 1]
        if task.pages != blocks or len(record.pages) * size < task.token_end:
            illegal(f"hidden handle {task.pages} is not the request's pages for its span, {blocks}", task)
        return record

    def check_span(self, record: Record, task: ExecutionTask) -> None:
        """Depth and positions are there to be run, and the task says what they are."""
        start, end = task.token_start, task.token_end
        if not 0 <= task.depth < self._config.depths or task.token_count < 1 or start < 0:
            illegal("depth or token range out of range", task)
        chunk = self._config.prefill_chunk_size
        if end > record.known or (chunk is not None and task.token_count > chunk):
            illegal(f"passes the {record.known} known tokens or the chunk size", task)
        prompt = end <= record.prefill_end
        if (task.kind is Kind.PROMPT) != prompt or (task.phase is Phase.COMPOSITE_DEPTH0) != (task.depth == 0):
            illegal("kind or phase does not fit the token range and depth", task)

    def check_tokens(self, record: Record, task: ExecutionTask) -> None:
        """The device has the tokens of rows at depth 0."""
        if not record.uploaded[task.token_start : task.token_end].all():
            illegal("runs tokens that the slot's table does not have", task)

    def check_dependencies(self, record: Record, depth: int, tasks: list[ExecutionTask]) -> None:
        """RFC "Dependency graph": hidden state of depth - 1 here, plane ``depth`` written for all before.

        ``tasks`` are all spans of one request at one depth.
        """
        for task in tasks:
            if (record.reached[task.token_start : task.token_end] != depth - 1).any():
                illegal(f"its hidden rows are not those of depth {depth - 1}", task)
            missing = set(np.flatnonzero(record.reached[: task.token_start] < depth).tolist())
            for other in tasks:  # a layer writes the KV of all rows of a step before any row attends
                missing.difference_update(range(other.token_start, other.token_end))
            if missing:
                illegal(f"plane {depth} is not written at position {min(missing)}", task)
            if record.gate is not None and task.token_start <= record.gate[0] < task.token_end:
                illegal("runs a position on whose gate has not decided yet", task)

    def check_coda(self, record: Record, task: ExecutionTask, action: CodaAction) -> None:
        """CODA only for the newest position, at a depth where it may leave, with all before it done that deep."""
        position, depth, last = task.token_start, task.depth, self._config.depths - 1
        if action is CodaAction.SCORE:
            if not record.spec.score_prompt or position >= record.prompt_len - 1 or record.scored[position]:
                illegal("scores a position that is not to be scored, or twice", task)
            if record.reached[position] != last or depth != last:
                illegal("scores a position before its last depth", task)
            if not record.uploaded[position + 1]:
                illegal("scores a token that the device does not have", task)
            return
        if position != record.known - 1 or record.reached[position] != depth or record.gate is not None:
            illegal("samples a position whose hidden row is not there", task)
        if (record.reached[:position] < depth).any() or record.known >= record.total_limit:
            illegal("samples before all known tokens are complete at this depth, or past the limit", task)
        if action is not self._expected_action(record, depth):
            illegal(f"may not {action.name} at depth {depth}", task)

    def _expected_action(self, record: Record, depth: int) -> CodaAction | None:
        rule, last = record.rule, self._config.depths - 1
        if record.known < len(record.tokens):
            replayed = record.exits[record.known - record.prompt_len]
            return CodaAction.REPLAY if depth == replayed else None
        if rule.copy and record.known == record.prompt_len:
            return CodaAction.SAMPLE if depth == last else None
        if depth == rule.max_depth:
            return CodaAction.SAMPLE
        return CodaAction.GATE if rule.gated and rule.min_depth <= depth < rule.max_depth else None
