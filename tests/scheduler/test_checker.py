"""Every rule of the checker refuses a plan that breaks it, and says so."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest

from tests.scheduler.harness import Harness, make_config, make_cost, token_at
from wavegraph.buckets.ladder import Ladder
from wavegraph.scheduler.checker import Checker
from wavegraph.scheduler.plan import CodaAction, ExitRule, Kind, Phase, StepPlan, TaskState
from wavegraph.scheduler.residency import UPDATE_FIELDS
from wavegraph.scheduler.rules import IllegalPlanError

Spoil = Callable[[StepPlan], object]


def in_step(plan: StepPlan) -> None:
    """Bring rows, bucket and the device's lists in step with the tasks."""
    plan.rows = sum(task.token_count for task in plan.tasks)
    plan.bucket = 16 if plan.tasks else 0
    plan.span_slot = [task.slot for task in plan.tasks]
    plan.span_start = [task.token_start for task in plan.tasks]
    plan.span_count = [task.token_count for task in plan.tasks]
    plan.span_depth = [task.depth for task in plan.tasks]
    plan.coda_slot = [task.slot for task in plan.coda_tasks]
    plan.coda_pos = [task.token_start for task in plan.coda_tasks]
    plan.coda_depth = [task.depth for task in plan.coda_tasks]
    plan.coda_bucket = 4 if plan.coda_tasks else 0


def task(index: int, **values: Any) -> Spoil:
    """Change a core task, and what the device gets with it."""

    def spoil(plan: StepPlan) -> None:
        plan.tasks[index] = replace(plan.tasks[index], **values)
        in_step(plan)

    return spoil


def coda(index: int, **values: Any) -> Spoil:
    def spoil(plan: StepPlan) -> None:
        plan.coda_tasks[index] = replace(plan.coda_tasks[index], **values)
        in_step(plan)

    return spoil


def entry(name: str, index: int, value: Any) -> Spoil:
    return lambda plan: getattr(plan, name).__setitem__(index, value)


def field(name: str, value: Any) -> Spoil:
    return lambda plan: setattr(plan, name, value)


def last_token_missing(plan: StepPlan) -> None:
    for tokens in (plan.token_slot, plan.token_pos, plan.token_id):
        del tokens[-1]


def twice(plan: StepPlan) -> None:
    plan.tasks.append(plan.tasks[-1])
    in_step(plan)


def harness() -> Harness:
    """Four depths, chunks of 4, pages of 4, budget 16."""
    return Harness(make_config(), Ladder([2, 8, 16]), Ladder([1, 4]))


def first_step() -> Harness:
    """A prompt of 9 begins: one span of 4 rows at depth 0, pages 0 (and on)."""
    made = harness()
    made.add("a", 9, 3)
    return made


def second_step() -> Harness:
    """Positions 4..7 at depth 0, 0..3 at depth 1."""
    made = first_step()
    assert made.plan() is not None
    return made


def staircase() -> Harness:
    """Its third step: positions 8 at depth 0, 4..7 at depth 1, 0..3 at depth 2, in some order."""
    made = first_step()
    for _ in range(2):
        assert made.plan() is not None
    return made


def drawing() -> Harness:
    """A prompt of 2, before the step that runs its last depth and draws."""
    made = harness()
    made.add("a", 2, 3)
    for _ in range(3):
        assert made.plan() is not None
    return made


def scoring() -> Harness:
    """A prompt of 3 at the same point, to be scored."""
    made = harness()
    made.add("a", 3, 3, score_prompt=True)
    for _ in range(3):
        assert made.plan() is not None
    return made


def decoding() -> Harness:
    """A first token was drawn; the next step runs it at depth 0."""
    made = drawing()
    assert made.plan() is not None
    return made


def skipped(plan: StepPlan) -> None:
    """The last position runs at depth 0 before the four in front of it."""
    plan.page_slot, plan.page_index, plan.page_id = [0, 0], [1, 2], [1, 2]
    plan.token_slot, plan.token_pos, plan.token_id = [0], [8], [token_at("a", 8)]
    last = next(each for each in plan.tasks if each.depth == 0)
    plan.tasks = [replace(last, token_start=8, token_count=1, pages=[2])]
    in_step(plan)


def second_chunk(plan: StepPlan) -> None:
    """Positions 4..7 of the request at slot 0 run at depth 0, and nothing else does."""
    plan.page_slot, plan.page_index, plan.page_id = [0], [1], [5]
    plan.token_slot, plan.token_pos = [0] * 4, list(range(4, 8))
    plan.token_id = [token_at("a", position) for position in plan.token_pos]
    plan.tasks = [
        replace(plan.tasks[0], depth=0, phase=Phase.COMPOSITE_DEPTH0, token_start=4, token_count=4, pages=[5])
    ]
    in_step(plan)


def behind_a_page(plan: StepPlan) -> None:
    """The first row stands behind a page that nobody filled."""
    second_chunk(plan)
    plan.page_slot, plan.page_index, plan.page_id = [0, 0], [0, 1], [0, 5]


def without_last(plan: StepPlan) -> None:
    del plan.tasks[-1]
    in_step(plan)


def ordinary() -> Harness:
    """Two prompts are a cohort, which has run depth 0."""
    made = Harness(make_config(wavefront=False), Ladder([2, 8, 16]), Ladder([1, 4]))
    made.add("a", 9, 3)
    made.add("b", 9, 3)
    assert made.plan() is not None
    return made


def neighbour() -> Harness:
    """A second request comes to the device beside the one that has page 0."""
    made = first_step()
    assert made.plan() is not None
    made.add("b", 3, 1)
    return made


def second_life() -> Harness:
    """An id that was cancelled is used again."""
    made = second_step()
    made.cancel("a")
    made.add("a", 9, 3)
    return made


def cached() -> Harness:
    """The first step of a prompt, with a prefix cache that holds nothing."""
    made = Harness(make_config(prefix_cache=True), Ladder([2, 8, 16]), Ladder([1, 4]))
    made.add("a", 9, 3)
    return made


def swapped() -> Harness:
    """Before the step that brings back a request whose pages are on the host."""
    made = Harness(make_config(swap_pages=9), Ladder([2, 8, 16]), Ladder([1, 4]))
    made.add("a", 9, 3)
    made.add("b", 9, 3)
    assert made.plan() is not None
    assert made.scheduler.preempt("b")
    plan = made.plan()
    assert plan is not None
    assert plan.swap_out
    while made.in_flight:
        made.complete()
    return made


RULES: list[tuple[str, Callable[[], Harness], Spoil]] = [
    ("step ids must count up", first_step, field("step_id", 5)),
    ("holds 4 rows, says 5", first_step, field("rows", 5)),
    ("is not on the ladder", first_step, field("bucket", 9)),
    ("does not hold 4 rows", first_step, field("bucket", 2)),
    ("coda bucket 2 ", drawing, field("coda_bucket", 2)),
    ("coda bucket 1 does not hold 0 rows", first_step, field("coda_bucket", 1)),
    ("differs from the tasks", first_step, entry("span_start", 0, 1)),
    ("coda rows differ", drawing, entry("coda_depth", 0, 2)),
    ("comes to slot 0 but is not waiting", first_step, entry("param_owner", 0, ("b", 1))),
    ("slot 4 is scratch", first_step, entry("param_slot", 0, 4)),
    ("page update (0, 1, 0) for no live request, or out of order", first_step, entry("page_index", 0, 1)),
    ("page 64 is scratch", first_step, entry("page_id", 0, 64)),
    ("is not a live request's token", first_step, entry("token_id", 0, 0)),
    ("is not alive on the device", first_step, task(0, request_id="b")),
    ("generation or slot", first_step, task(0, generation=7)),
    ("not in state SUBMITTED", first_step, task(0, state=TaskState.COMPLETED)),
    ("hidden handle", first_step, task(0, pages=[5])),
    ("depth or token range", first_step, task(0, depth=4)),
    ("chunk size", staircase, task(0, token_start=0, token_count=5, pages=[0, 1])),
    ("passes the 3 known tokens", decoding, task(0, token_count=2)),
    ("kind or phase", first_step, task(0, kind=Kind.DECODE)),
    ("hidden rows are not those of depth 1", drawing, task(0, depth=2)),
    ("hidden rows are not those of depth -1", drawing, task(0, depth=0, phase=Phase.COMPOSITE_DEPTH0)),
    ("tokens that the slot's table does not have", first_step, last_token_missing),
    ("starts behind a prefix that is not whole pages", first_step, task(0, token_start=1, token_count=3)),
    ("plane 0 is not written at position 4", second_step, skipped),
    ("is not the next depth of the running cohort", ordinary, without_last),
    ("starts a cohort before the last one ended", ordinary, second_chunk),
    ("scores a position before its last depth", scoring, coda(0, depth=2)),
    ("generation 1 was used before", second_life, entry("param_owner", 0, ("a", 1))),
    ("page 0 belongs to another request", neighbour, entry("page_id", -1, 0)),
    ("page 0 does not hold the finished prefix", cached, behind_a_page),
    ("swaps out [5] of generation 1, which holds [0", second_step, field("swap_out", [(1, [5])])),
    ("comes back without its", swapped, field("swap_in", [])),
    ("runs twice in one step", staircase, twice),
    ("may not GATE at depth 3", drawing, entry("coda_action", 0, CodaAction.GATE)),
    ("may not REPLAY at depth 3", drawing, entry("coda_action", 0, CodaAction.REPLAY)),
    ("not to be scored", drawing, entry("coda_action", 0, CodaAction.SCORE)),
    ("samples a position whose hidden row", drawing, coda(0, token_start=0)),
    ("samples a position whose hidden row", drawing, coda(0, depth=2)),
    ("is not to be scored, or twice", scoring, coda(1, token_start=0)),
]


@pytest.mark.parametrize(("message", "make", "spoil"), RULES, ids=[message for message, _, _ in RULES])
def test_a_plan_that_breaks_a_rule_is_refused(message: str, make: Callable[[], Harness], spoil: Spoil) -> None:
    made = make()
    plan = made.scheduler.plan()
    assert plan is not None
    deepcopy(made.checker).check(plan)
    spoiled = deepcopy(plan)
    spoil(spoiled)
    with pytest.raises(IllegalPlanError) as caught:
        made.checker.check(spoiled)
    assert message in str(caught.value)


def serve_a_few(made: Harness) -> None:
    """Two requests that decode, and two prompts that come in beside them."""
    made.add("a", 3, 4)
    made.add("b", 3, 4)
    for _ in range(5):
        assert made.plan() is not None
        made.complete()
    made.add("c", 9, 1)
    made.add("d", 9, 1)
    made.run()


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"fused": False}, "although steps are separate"),
        ({"wavefront": False}, "although wavefront is off"),
        ({"max_num_seqs": 1}, "more than max_num_seqs=1 requests"),
        ({"max_num_batched_tokens": 4}, "budget 4"),
        ({"max_coda_rows": 1}, "holds 2 coda rows, over the limit"),
        ({"prefill_chunk_size": 2}, "chunk size"),
        ({"target_step_seconds": 5.0}, "past the target of 5 s"),
        ({"depths": 3}, "depth or token range out of range"),
    ],
)
def test_a_checker_of_tighter_limits_refuses_what_looser_ones_allow(limits: dict[str, Any], message: str) -> None:
    made = harness()
    made.checker = Checker(make_config(**limits), cost=make_cost(1, 1))
    with pytest.raises(IllegalPlanError) as caught:
        serve_a_few(made)
    assert message in str(caught.value)


def test_a_position_may_not_run_on_before_its_gate_has_decided() -> None:
    made = harness()
    made.add("a", 3, 3, exit_rule=ExitRule(3, 0, gated=True))
    plan = made.plan()
    assert plan is not None
    assert plan.coda_action == [CodaAction.GATE]
    on = StepPlan(1, [replace(plan.tasks[0], depth=1, phase=Phase.RECURRENT, step_id=1)])
    in_step(on)
    with pytest.raises(IllegalPlanError, match="gate has not decided"):
        made.checker.check(on)


def test_a_prompt_frontier_that_passes_what_has_run_is_refused() -> None:
    made = second_step()
    made.checker.check_prefilled("a", 0)
    with pytest.raises(IllegalPlanError, match="num_prefilled_tokens 1 passes the completed 0"):
        made.checker.check_prefilled("a", 1)


def test_a_page_that_came_with_a_plan_that_failed_may_come_again() -> None:
    """It may be for a request with no row in that plan, which goes on living: its row was put back for a bucket."""
    made = staircase()
    made.add("b", 3, 1)
    plan = made.scheduler.plan()
    assert plan is not None
    failed, following = deepcopy(plan), deepcopy(plan)
    failed.tasks = [each for each in plan.tasks if each.request_id == "b"]
    following.tasks = [each for each in plan.tasks if each.request_id == "a"]
    in_step(failed)
    in_step(following)
    assert (0, 2) in zip(failed.page_slot, failed.page_index, strict=True)
    made.checker.check(failed)
    made.checker.retract(failed)
    made.checker.end("b")
    following.step_id += 1
    for names in UPDATE_FIELDS:  # what was said of the request that ended is not said again
        kept = [index for index, slot in enumerate(getattr(plan, names[0])) if slot == 0]
        for name in names:
            setattr(following, name, [getattr(plan, name)[index] for index in kept])
    made.checker.check(following)
