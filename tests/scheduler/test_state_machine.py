"""Anything the engine may do to a scheduler, in any order, judged by the independent checker."""

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.scheduler.harness import Harness, make_config, make_cost, token_at
from wavegraph.buckets.cost import CostModel
from wavegraph.buckets.ladder import Ladder
from wavegraph.scheduler.admission import Fcfs, Priority
from wavegraph.scheduler.order import DecodeFirst, Fifo, Refill
from wavegraph.scheduler.plan import ExitRule

RULES_RUN = 0


class SchedulerMachine(RuleBasedStateMachine):
    """Tiny budgets, a pool that two requests can fill, ids that come back, results in any order."""

    @initialize(
        depths=st.integers(1, 4),
        chunk=st.none() | st.integers(1, 5),
        packing=st.sampled_from(["fill", "fill", "fifo"]),
        step_seconds=st.none() | st.floats(0.0, 16.0),
        cost=st.sampled_from([make_cost(4, 1), make_cost(0, 1, 0.2, 0.5), make_cost(9, 0), make_cost(1, 1, 0.0, 2)]),
        budget=st.integers(1, 9),
        seqs=st.integers(1, 3),
        pages=st.integers(4, 9),
        mode=st.sampled_from(["ordinary", "separate", "fused"]),
        stage_policy=st.sampled_from([Fifo(), DecodeFirst(2), Refill(2)]),
        ranking=st.sampled_from([Fcfs(), Priority(3)]),
        refill=st.booleans(),
        reserve_worst_case=st.booleans(),
        swap_pages=st.sampled_from([0, 3, 100]),
        prefix_cache=st.booleans(),
        with_ladder=st.booleans(),
    )
    def start(
        self,
        mode: str,
        budget: int,
        with_ladder: bool,
        seqs: int,
        pages: int,
        step_seconds: float | None,
        cost: CostModel,
        **options: Any,
    ) -> None:
        config = make_config(
            max_num_batched_tokens=budget,
            page_size=3,
            max_model_len=20,
            max_num_seqs=seqs,
            num_pages=pages,
            wavefront=mode != "ordinary",
            fused=mode == "fused",
            max_bypass=2,
            target_step_seconds=step_seconds,
            **{("prefill_chunk_size" if name == "chunk" else name): value for name, value in options.items()},
        )
        ladders = (Ladder([2, 5, 9, 10]), Ladder.default(seqs)) if with_ladder else (None, None)
        self.harness = Harness(config, *ladders, cost)

    @rule(
        name=st.sampled_from("abcd"),
        prompt=st.integers(1, 9),
        max_tokens=st.integers(1, 4),
        stops=st.booleans(),
        priority=st.integers(0, 2),
        shared_prompt=st.booleans(),
        score_prompt=st.booleans(),
        history=st.booleans(),
        exits=st.none() | st.tuples(st.integers(0, 3), st.integers(0, 3), st.booleans(), st.booleans()),
    )
    def add(
        self,
        name: str,
        prompt: int,
        max_tokens: int,
        stops: bool,
        priority: int,
        shared_prompt: bool,
        score_prompt: bool,
        history: bool,
        exits: tuple[int, int, bool, bool] | None,
    ) -> None:
        self._count()
        if name in self.harness.checker.live:
            return
        exit_rule = None
        if exits is not None and not score_prompt:
            first, last = sorted(min(depth, self.harness.config.depths - 1) for depth in exits[:2])
            exit_rule = ExitRule(last, first, gated=exits[2], copy=exits[3])
        self.harness.add(
            name,
            prompt,
            max_tokens,
            frozenset({token_at(name, prompt)}) if stops else frozenset(),
            prompt_of="shared" if shared_prompt else None,
            priority=priority,
            score_prompt=score_prompt,
            needs_history=history,
            exit_rule=exit_rule,
        )

    @precondition(lambda self: self.harness.running())
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        self._count()
        assert self.harness.scheduler.preempt(data.draw(st.sampled_from(self.harness.running())))

    @rule()
    def forget_prefixes(self) -> None:
        self._count()
        self.harness.scheduler.forget_prefixes()
        self.harness.checker.forget_prefixes()

    @precondition(lambda self: len(self.harness.in_flight) < 6)
    @rule()
    def plan(self) -> None:
        self._count()
        plan = self.harness.plan()
        if plan is None and self.harness.scheduler.has_unfinished:
            assert self.harness.in_flight, "requests are waiting, nothing runs, and no step is planned"

    @precondition(lambda self: self.harness.in_flight)
    @rule(data=st.data())
    def complete(self, data: st.DataObject) -> None:
        self._count()
        self.harness.complete(data.draw(st.integers(0, len(self.harness.in_flight) - 1)))

    @precondition(lambda self: self.harness.checker.live)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self._count()
        self.harness.cancel(data.draw(st.sampled_from(sorted(self.harness.checker.live))))

    @precondition(lambda self: len(self.harness.in_flight) < 6)
    @rule()
    def plan_that_cannot_be_launched(self) -> None:
        """Its requests end, nobody else's do."""
        self._count()
        plan = self.harness.plan()
        if plan is not None:
            owned = {task.request_id for task in (*plan.tasks, *plan.coda_tasks)}
            assert owned >= set(self.harness.fail_newest())

    @invariant()
    def frontiers_are_honest(self) -> None:
        if hasattr(self, "harness"):
            self.harness.check_frontiers()

    def teardown(self) -> None:
        if not hasattr(self, "harness"):
            return
        harness = self.harness
        for _ in range(2000):
            if harness.in_flight:
                harness.complete()
            elif harness.plan() is None:
                break
        for request_id, reason in harness.reasons.items():
            if reason in ("stop", "length"):
                harness.check_output(request_id)
        harness.check_drained()

    def _count(self) -> None:
        global RULES_RUN
        RULES_RUN += 1


def test_scheduler_state_machine() -> None:
    profile = settings(
        max_examples=120,
        stateful_step_count=50,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(SchedulerMachine, settings=profile)
    assert RULES_RUN >= 2000
