"""Anything the engine may do to a scheduler, in any order, judged by the independent checker."""

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

from tests.scheduler.harness import Harness, make_config, token_at
from wavegraph.buckets.ladder import Ladder

RULES_RUN = 0


class SchedulerMachine(RuleBasedStateMachine):
    """Tiny budgets, a pool that two requests can fill, ids that come back, results in any order."""

    @initialize(
        depths=st.integers(1, 4),
        chunk=st.integers(1, 5),
        budget=st.integers(1, 9),
        seqs=st.integers(1, 3),
        pages=st.integers(4, 9),
        wavefront=st.booleans(),
        with_ladder=st.booleans(),
    )
    def start(
        self, depths: int, chunk: int, budget: int, seqs: int, pages: int, wavefront: bool, with_ladder: bool
    ) -> None:
        config = make_config(
            depths=depths,
            prefill_chunk_size=chunk,
            max_num_batched_tokens=budget,
            max_num_seqs=seqs,
            num_pages=pages,
            page_size=3,
            max_model_len=20,
            wavefront=wavefront,
        )
        self.harness = Harness(config, Ladder.default(budget) if with_ladder else None)

    @rule(
        name=st.sampled_from("abcd"),
        prompt=st.integers(1, 9),
        max_tokens=st.integers(1, 3),
        stops=st.booleans(),
    )
    def add(self, name: str, prompt: int, max_tokens: int, stops: bool) -> None:
        self._count()
        if name in self.harness.checker._live:
            return
        stop = frozenset({token_at(name, prompt)}) if stops else frozenset()
        self.harness.add(name, prompt, max_tokens, stop)

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

    @precondition(lambda self: self.harness.checker._live)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self._count()
        self.harness.cancel(data.draw(st.sampled_from(sorted(self.harness.checker._live))))

    @precondition(lambda self: self.harness.in_flight)
    @rule()
    def fail_newest(self) -> None:
        """The newest plan could not be launched: its requests end, nobody else's do."""
        self._count()
        plan = self.harness.in_flight.pop()
        owned = {task.request_id for task in plan.tasks}
        for request_id in self.harness.scheduler.fail(plan):
            assert request_id in owned
            self.harness.end(request_id, "failed")

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
