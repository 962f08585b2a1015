"""Early exit: where the token comes from, and what happens to the depths after it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.scheduler.harness import Harness, make_config
from wavegraph.errors import EngineError, RequestError
from wavegraph.scheduler.plan import COPY_KV, CodaAction, ExitRule, StepResult


def run(rule: ExitRule | None, prompt: int = 1, max_tokens: int = 4, **config: object) -> Harness:
    harness = Harness(make_config(**config))
    harness.add("a", prompt, max_tokens, exit_rule=rule)
    harness.run()
    harness.check_output("a")
    harness.check_drained()
    return harness


def rows(harness: Harness) -> list[set[tuple[int, int]]]:
    return [{(t.depth, p) for t in plan.tasks for p in range(t.token_start, t.token_end)} for plan in harness.plans]


def test_an_exact_exit_gives_its_token_at_once_and_finishes_beside_the_next() -> None:
    harness = run(ExitRule(1, 1), depths=3)
    assert rows(harness) == [
        {(0, 0)},
        {(1, 0)},
        {(2, 0), (0, 1)},
        {(1, 1)},
        {(2, 1), (0, 2)},
        {(1, 2)},
        {(2, 2), (0, 3)},
        {(1, 3)},
    ]
    assert [plan.coda_depth for plan in harness.plans] == [[], [1], [], [1], [], [1], [], [1]]


def test_an_exact_exit_at_the_first_depth_takes_one_step_a_token() -> None:
    harness = run(ExitRule(0, 0), max_tokens=6)
    assert len(harness.plans) == 6


def test_the_last_prompt_position_may_leave_early_too() -> None:
    harness = run(ExitRule(0, 0), prompt=6, max_tokens=1, depths=3)
    assert len(harness.plans) == 2  # two chunks at depth 0; nobody needs the rest


def test_copy_runs_prompt_and_first_token_at_full_depth_and_skips_the_rest() -> None:
    harness = run(ExitRule(0, 0, copy=True), prompt=2, max_tokens=4, depths=3)
    assert rows(harness) == [{(0, 0), (0, 1)}, {(1, 0), (1, 1)}, {(2, 0), (2, 1)}, {(0, 2)}, {(0, 3)}, {(0, 4)}]
    assert [bool(plan.coda_features & COPY_KV) for plan in harness.plans] == [False] * 3 + [True] * 3


def test_a_gated_request_is_planned_on_only_after_its_result() -> None:
    harness = Harness(make_config(depths=3))
    harness.add("c", 1, 5, exit_rule=ExitRule(2, 0, gated=True))
    harness.add("b", 30, 1)
    plan = harness.plan()
    assert plan is not None
    assert plan.coda_action == [CodaAction.GATE]
    for _ in range(3):
        ahead = harness.plan()
        assert ahead is not None
        assert {task.request_id for task in ahead.tasks} == {"b"}  # others run ahead
    while harness.in_flight:
        harness.complete()
    harness.run()
    harness.check_output("c")
    assert len(set(harness.exits["c"])) > 1, "the made-up gate was to open at several depths"


def test_a_forced_exit_runs_ahead_of_its_results() -> None:
    harness = Harness(make_config(depths=3))
    harness.add("a", 1, 8, exit_rule=ExitRule(1, 1))
    for _ in range(6):
        assert harness.plan() is not None
    assert sum(len(plan.coda_tasks) for plan in harness.plans) == 3


def test_recomputed_copies_repeat_their_exits_and_draw_nothing_twice() -> None:
    harness = Harness(make_config(depths=3, reserve_worst_case=False, swap_pages=0))
    harness.add("a", 3, 8, exit_rule=ExitRule(2, 0, gated=True, copy=True))
    while len(harness.outputs["a"]) < 5:
        harness.plan()
        harness.complete()
    assert harness.scheduler.preempt("a")
    harness.run()
    harness.check_output("a")
    replays = [t for p in harness.plans for t, a in zip(p.coda_tasks, p.coda_action, strict=True) if a == 3]
    assert [task.depth for task in replays] == harness.exits["a"][1:5] or [
        task.depth for task in replays
    ] == harness.exits["a"][:5]
    harness.check_drained()


EXITS = st.none() | st.tuples(st.integers(0, 2), st.integers(0, 2), st.booleans(), st.booleans())


@given(
    rules=st.lists(
        st.none() | st.tuples(st.integers(0, 2), st.integers(0, 2), st.booleans(), st.booleans()),
        min_size=1,
        max_size=4,
    ),
    chunk=st.integers(1, 6),
    budget=st.integers(1, 7),
    mode=st.sampled_from(["ordinary", "separate", "fused"]),
    ahead=st.integers(1, 3),
)
def test_any_mix_of_exits(
    rules: list[tuple[int, int, bool, bool] | None], chunk: int, budget: int, mode: str, ahead: int
) -> None:
    """Tight budgets make deep lanes lag, so that prompt and decoded positions queue in one."""
    config = make_config(
        depths=3,
        prefill_chunk_size=chunk,
        max_num_batched_tokens=budget,
        wavefront=mode != "ordinary",
        fused=mode == "fused",
    )
    harness = Harness(config)
    for index, exits in enumerate(rules):
        rule = None
        if exits is not None:
            first, last = sorted(exits[:2])
            rule = ExitRule(last, first, gated=exits[2], copy=exits[3])
        harness.add(str(index), 3 + index, 5, exit_rule=rule)
    while True:
        while len(harness.in_flight) < ahead and harness.plan() is not None:
            pass
        if not harness.in_flight:
            break
        harness.complete()
    for name in harness.specs:
        harness.check_output(name)
    harness.check_drained()


def test_a_draw_without_a_token_is_an_error_not_a_hang() -> None:
    harness = Harness(make_config(depths=1))
    harness.add("a", 1, 2)
    plan = harness.plan()
    assert plan is not None
    with pytest.raises(EngineError, match="drew no token"):
        harness.scheduler.apply(plan, StepResult(plan.step_id, [-1]))


def test_prompt_scores_come_once_for_each_position_and_before_the_token() -> None:
    harness = Harness(make_config(max_coda_rows=2))
    harness.add("a", 9, 2, score_prompt=True)
    harness.run()
    actions = [(t.token_start, a) for p in harness.plans for t, a in zip(p.coda_tasks, p.coda_action, strict=True)]
    assert sorted(p for p, a in actions if a == CodaAction.SCORE) == list(range(8))
    assert actions.index((8, CodaAction.SAMPLE)) > max(i for i, (_, a) in enumerate(actions) if a == CodaAction.SCORE)
    harness.check_output("a")
    harness.check_drained()


def test_prompt_scores_with_early_exit_are_refused() -> None:
    harness = Harness(make_config())
    with pytest.raises(RequestError, match="full depth"):
        harness.add("a", 4, score_prompt=True, exit_rule=ExitRule(0, 0))
