"""Runs a scheduler against the independent checker, with a made-up model."""

from collections import deque

from wavegraph.buckets.ladder import Ladder
from wavegraph.scheduler.checker import Checker
from wavegraph.scheduler.plan import RequestSpec, RequestUpdate, StepPlan, StepResult
from wavegraph.scheduler.scheduler import Scheduler, SchedulerConfig


def make_config(**overrides: int | bool) -> SchedulerConfig:
    values: dict[str, int | bool] = {
        "depths": 4,
        "page_size": 4,
        "num_pages": 64,
        "max_model_len": 128,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "prefill_chunk_size": 4,
        "wavefront": True,
    }
    return SchedulerConfig(**(values | overrides))  # type: ignore[arg-type]


def token_at(request_id: str, position: int) -> int:
    """The made-up model's token: a function of request and position alone, so any mix-up shows."""
    return (sum(request_id.encode()) * 31 + position * 7) % 97 + 1


class Harness:
    """Scheduler, checker, and what each request should put out."""

    def __init__(self, config: SchedulerConfig, ladder: Ladder | None = None, coda_ladder: Ladder | None = None):
        self.config = config
        self.scheduler = Scheduler(config, ladder, coda_ladder)
        self.checker = Checker(config, ladder, coda_ladder)
        self.in_flight: deque[StepPlan] = deque()
        self.specs: dict[str, RequestSpec] = {}
        self.outputs: dict[str, list[int]] = {}
        self.reasons: dict[str, str] = {}
        self.plans: list[StepPlan] = []

    def add(self, request_id: str, prompt_len: int, max_tokens: int = 1, stop: frozenset[int] = frozenset()) -> None:
        spec = RequestSpec(request_id, [token_at(request_id, p) for p in range(prompt_len)], max_tokens, stop)
        self.scheduler.add(spec)
        self.checker.add(spec)
        self.specs[request_id] = spec
        self.outputs[request_id] = []
        self.reasons.pop(request_id, None)

    def plan(self) -> StepPlan | None:
        plan = self.scheduler.plan()
        if plan is not None:
            self.checker.check(plan)
            self.in_flight.append(plan)
            self.plans.append(plan)
        return plan

    def complete(self, index: int = 0) -> list[RequestUpdate]:
        plan = self.in_flight[index]
        del self.in_flight[index]
        self.checker.complete(plan)
        tokens = [token_at(task.request_id, task.token_start + 1) for task in plan.coda_tasks]
        updates = self.scheduler.apply(plan, StepResult(plan.step_id, tokens))
        for update in updates:
            assert update.request_id not in self.reasons, "news of a request that has ended"
            self.outputs[update.request_id].append(update.token_id)
            if update.finish_reason is not None:
                self.end(update.request_id, update.finish_reason)
        self.check_frontiers()
        return updates

    def cancel(self, request_id: str) -> None:
        assert self.scheduler.cancel(request_id)
        self.end(request_id, "cancelled")

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
        return list(self.scheduler._running)

    def check_output(self, request_id: str) -> None:
        """The finished request's tokens are its own, in order, each once, up to its stop."""
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

    def check_drained(self) -> None:
        """Nothing leaks: every page, slot and id is back."""
        scheduler = self.scheduler
        assert not scheduler.has_unfinished
        assert scheduler.num_free_pages == scheduler._pages.available == self.config.num_pages
        assert sorted(scheduler._free_slots) == list(range(self.config.max_num_seqs))
        assert set(self.reasons) == set(self.specs), "a request was admitted and never ended"
