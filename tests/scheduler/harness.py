"""Runs a scheduler against the independent checker, with a made-up model."""

from collections import deque
from typing import Any

from wavegraph.buckets.cost import CostModel, ProgramCost
from wavegraph.buckets.ladder import Ladder
from wavegraph.scheduler.checker import Checker
from wavegraph.scheduler.config import SchedulerConfig
from wavegraph.scheduler.plan import CodaAction, RequestSpec, RequestUpdate, StepPlan, StepResult
from wavegraph.scheduler.scheduler import Scheduler


def make_config(**overrides: Any) -> SchedulerConfig:
    values: dict[str, Any] = {
        "depths": 4,
        "page_size": 4,
        "num_pages": 64,
        "max_model_len": 128,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "prefill_chunk_size": 4,
    }
    return SchedulerConfig(**(values | overrides))


def token_at(request_id: str, position: int) -> int:
    """The made-up model's token: a function of request and position alone, so any mix-up shows."""
    return (sum(request_id.encode()) * 31 + position * 7) % 97 + 1


def gate_opens(request_id: str, position: int, depth: int) -> bool:
    """The made-up model's gate."""
    return (sum(request_id.encode()) * 5 + position * 7 + depth * 11) % 3 == 0


def make_cost(
    fixed: float, per_row: float, per_position: float = 0.0, coda: float | None = None, top: int = 256
) -> CostModel:
    """Seconds of a step: ``fixed`` plus ``per_row`` for each row of its bucket, and so on; passes for measured."""

    def program(seconds: tuple[float, float]) -> ProgramCost:
        return ProgramCost((1, top), seconds, (0.0, 0.0), (0, 0))

    core = program((fixed + per_row, fixed + per_row * top))
    return CostModel(core, program((coda, coda * top)) if coda is not None else None, per_position, source="test")


class Harness:
    """Scheduler, checker, and what each request should put out."""

    def __init__(
        self,
        config: SchedulerConfig,
        ladder: Ladder | None = None,
        coda_ladder: Ladder | None = None,
        cost: CostModel | None = None,
    ) -> None:
        self.config = config
        self.scheduler = Scheduler(config, ladder, coda_ladder, cost)
        self.checker = Checker(config, ladder, coda_ladder, cost)
        self.in_flight: deque[StepPlan] = deque()
        self.specs: dict[str, RequestSpec] = {}
        self.outputs: dict[str, list[int]] = {}
        self.exits: dict[str, list[int]] = {}
        self.reasons: dict[str, str] = {}
        self.plans: list[StepPlan] = []

    def add(
        self,
        request_id: str,
        prompt_len: int,
        max_tokens: int = 1,
        stop: frozenset[int] = frozenset(),
        *,
        prompt_of: str | None = None,
        **spec: Any,
    ) -> None:
        prompt = [token_at(prompt_of or request_id, position) for position in range(prompt_len)]
        self.add_spec(RequestSpec(request_id, prompt, max_tokens, stop, **spec))

    def add_spec(self, request: RequestSpec) -> None:
        request_id = request.request_id
        self.scheduler.add(request)
        self.checker.add(request)
        self.specs[request_id] = request
        self.outputs[request_id] = []
        self.exits[request_id] = []
        self.reasons.pop(request_id, None)

    def plan(self) -> StepPlan | None:
        plan = self.scheduler.plan()
        if plan is not None:
            self.checker.check(plan)
            self.in_flight.append(plan)
            self.plans.append(plan)
        return plan

    def tokens(self, plan: StepPlan) -> list[int]:
        """What the made-up model draws for the coda rows of a plan."""
        drawn = []
        for task, action in zip(plan.coda_tasks, plan.coda_action, strict=True):
            draws = action == CodaAction.SAMPLE or (
                action == CodaAction.GATE and gate_opens(task.request_id, task.token_start, task.depth)
            )
            drawn.append(token_at(task.request_id, task.token_start + 1) if draws else -1)
        return drawn

    def complete(self, index: int = 0) -> list[RequestUpdate]:
        plan = self.in_flight[index]
        del self.in_flight[index]
        tokens = self.tokens(plan)
        self.checker.complete(plan, tokens)
        updates = self.scheduler.apply(plan, StepResult(plan.step_id, tokens))
        for update in updates:
            assert update.request_id not in self.reasons, "news of a request that has ended"
            self.checker.accept(update)
            self.outputs[update.request_id].append(update.token_id)
            self.exits[update.request_id].append(update.exit_depth)
            if update.finish_reason is not None:
                self.end(update.request_id, update.finish_reason)
        self.check_frontiers()
        return updates

    def cancel(self, request_id: str) -> None:
        assert self.scheduler.cancel(request_id)
        self.end(request_id, "cancelled")

    def fail_newest(self) -> list[str]:
        """The newest plan could not be launched."""
        plan = self.in_flight.pop()
        self.checker.retract(plan)
        failed = self.scheduler.fail(plan)
        for request_id in failed:
            self.end(request_id, "failed")
        return failed

    def end(self, request_id: str, reason: str) -> None:
        self.checker.end(request_id)
        self.reasons[request_id] = reason

    def run(self) -> None:
        """Plan and complete one step at a time until nothing is left."""
        while self.plan() is not None:
            self.complete()

    def check_frontiers(self) -> None:
        for request_id in self.running():
            self.checker.check_prefilled(request_id, self.scheduler.num_prefilled_tokens(request_id))

    def running(self) -> list[str]:
        return list(self.scheduler.residency.running)

    def check_output(self, request_id: str) -> None:
        """The finished request's tokens are its own, in order, each once, up to its stop, at the depths of its rule."""
        spec, reason = self.specs[request_id], self.reasons[request_id]
        prompt = len(spec.prompt_token_ids)
        expected = []
        for position in range(prompt, min(prompt + spec.max_tokens, self.config.max_model_len)):
            expected.append(token_at(request_id, position))
            if expected[-1] in spec.stop_token_ids:
                break
        got = self.outputs[request_id]
        assert got == (expected if reason in ("stop", "length") else expected[: len(got)])
        if reason in ("stop", "length"):
            assert (reason == "stop") == (expected[-1] in spec.stop_token_ids)
        depths = [self._exit_depth(spec, prompt - 1 + index) for index in range(len(got))]
        assert self.exits[request_id] == depths

    def _exit_depth(self, spec: RequestSpec, position: int) -> int:
        rule, last = spec.exit_rule, self.config.depths - 1
        if rule is None or (rule.copy and position < len(spec.prompt_token_ids)):
            return last
        if rule.gated:
            for depth in range(rule.min_depth, rule.max_depth):
                if gate_opens(spec.request_id, position, depth):
                    return depth
        return rule.max_depth

    def check_drained(self) -> None:
        """Nothing leaks: every page, slot and id is back."""
        residency = self.scheduler.residency
        assert not self.scheduler.has_unfinished
        assert not residency.running
        assert not len(residency.waiting)
        assert residency.pages.num_free == residency.pages.available == self.config.num_pages
        assert sorted(residency.free_slots) == list(range(self.config.max_num_seqs))
        assert residency.swapped_pages == 0
        assert set(self.reasons) == set(self.specs), "a request was admitted and never ended"
