"""Every policy's bound: nobody waits for ever, and how long is stated."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.scheduler.harness import Harness, make_config
from wavegraph.scheduler.admission import Fcfs, Priority
from wavegraph.scheduler.order import DecodeFirst, Fifo, Refill, StagePolicy
from wavegraph.scheduler.plan import Kind, StepPlan


def kinds(plan: StepPlan) -> set[Kind]:
    return {task.kind for task in plan.tasks}


def loaded(policy: StagePolicy, *, fused: bool, budget: int = 8, seqs: int = 4) -> Harness:
    """Two decoding requests, and prompts that keep arriving (`feed`)."""
    config = make_config(
        stage_policy=policy,
        fused=fused,
        max_num_batched_tokens=budget,
        max_num_seqs=seqs,
        num_pages=500,
        max_model_len=400,
        depths=2,
    )
    harness = Harness(config)
    harness.add("x", 1, max_tokens=60)
    harness.add("y", 1, max_tokens=60)
    return harness


def feed(harness: Harness, count: int) -> None:
    """Keep long prompts waiting."""
    while harness.scheduler.num_waiting < count:
        harness.add(f"p{len(harness.specs)}", 40)


def token_gaps(harness: Harness, name: str, steps: int, prompts: bool) -> list[int]:
    """Steps between the tokens of ``name`` while prompts keep coming."""
    gaps, since = [], 0
    for _ in range(steps):
        if prompts:
            feed(harness, 3)
        if harness.plan() is None:
            break
        since += 1
        if any(update.request_id == name for update in harness.complete()):
            gaps.append(since)
            since = 0
        if name in harness.reasons:
            break
    return [*gaps[1:], since]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("policy", [DecodeFirst(3), Refill(2), Fifo()])
def test_steps_between_two_tokens_stay_within_the_documented_bound(policy: StagePolicy, fused: bool) -> None:
    """docs/architecture.md: D * ceil(S * D / B) * (1 + k), with k steps that may pass decode rows over in a row."""
    budget, seqs, depths = 8, 4, 2
    harness = loaded(policy, fused=fused, budget=budget, seqs=seqs)
    passed_over = {DecodeFirst: 1, Refill: 2, Fifo: math.ceil(seqs * depths * 4 / budget)}[type(policy)]
    bound = depths * math.ceil(seqs * depths / budget) * (1 + passed_over)
    gaps = token_gaps(harness, "x", 400, prompts=True)
    assert len(gaps) > 20
    assert max(gaps) <= bound


@pytest.mark.parametrize("fused", [False, True])
def test_prompts_are_not_starved_by_decode(fused: bool) -> None:
    """Decode rows fill every step by themselves; a prompt still gets a step after ``limit`` without one."""
    limit = 3
    harness = loaded(DecodeFirst(limit), fused=fused, budget=2, seqs=4)
    harness.add("z", 1, max_tokens=60)
    for _ in range(12):
        harness.plan()
        harness.complete()
    harness.add("p", 20)
    waited, longest = 0, 0
    while "p" not in harness.reasons:
        plan = harness.plan()
        assert plan is not None
        harness.complete()
        waited = 0 if Kind.PROMPT in kinds(plan) else waited + 1
        longest = max(longest, waited)
    assert 0 < longest <= limit


def test_refill_gives_decode_a_step_after_its_limit() -> None:
    harness = loaded(Refill(3), fused=False)
    for _ in range(8):  # until both decode
        harness.plan()
        harness.complete()
    without = 0
    longest = 0
    for _ in range(60):
        feed(harness, 3)
        plan = harness.plan()
        assert plan is not None
        harness.complete()
        without = 0 if Kind.DECODE in kinds(plan) else without + 1
        longest = max(longest, without)
    assert longest == 3


def test_separate_steps_hold_one_kind_and_fused_ones_mix() -> None:
    mixed = {}
    for fused in (False, True):
        harness = loaded(DecodeFirst(), fused=fused)
        for step in range(30):
            if step == 5:
                feed(harness, 2)
            harness.plan()
            harness.complete()
        mixed[fused] = any(len(kinds(plan)) == 2 for plan in harness.plans)
    assert mixed == {False: False, True: True}


def test_no_refill_admits_cohorts() -> None:
    harness = Harness(make_config(refill=False, max_num_seqs=2))
    for index, length in enumerate((4, 20, 4, 4)):
        harness.add(str(index), length)
    seen = []
    while harness.plan() is not None:
        seen.append(frozenset(harness.running()))
        harness.complete()
    assert set(seen) == {frozenset("01"), frozenset("1"), frozenset("23")}


@given(arrivals=st.lists(st.integers(0, 2), min_size=1, max_size=60), level=st.integers(1, 8))
def test_priority_overtakes_by_at_most_its_worth_in_arrivals(arrivals: list[int], level: int) -> None:
    harness = Harness(make_config(max_num_seqs=1, num_pages=200, ranking=Priority(level), depths=1))
    order: list[int] = []
    for index, priority in enumerate(arrivals):
        harness.add(str(index), 1, priority=priority)
    while harness.plan() is not None:
        order += [int(update.request_id) for update in harness.complete()]
    for place, index in enumerate(order):
        overtaken_by = sum(1 for other in order[:place] if other > index)
        assert overtaken_by <= level * arrivals[index]


def test_priority_goes_first_and_preempts() -> None:
    harness = Harness(make_config(max_num_seqs=1, ranking=Priority(), reserve_worst_case=False, swap_pages=64))
    harness.add("low", 20, max_tokens=8, priority=1)
    for _ in range(4):
        harness.plan()
        harness.complete()
    harness.add("high", 8, priority=0)
    harness.plan()
    assert harness.running() == ["high"]
    harness.complete()
    harness.run()
    assert list(harness.reasons) == ["high", "low"]
    harness.check_output("low")
    harness.check_drained()


@pytest.mark.parametrize("ranking", [Fcfs(), Priority()])
def test_a_blocked_request_is_passed_a_bounded_number_of_times(ranking: Fcfs | Priority) -> None:
    harness = Harness(make_config(num_pages=10, max_num_seqs=8, max_bypass=3, ranking=ranking, depths=1))
    harness.add("holder", 16, max_tokens=6)
    harness.plan()
    harness.complete()
    harness.add("big", 32, max_tokens=2)  # 9 pages; it fits only once the holder is gone
    for index in range(8):
        harness.add(f"small{index}", 1)
    while "big" not in harness.running():
        harness.plan()
        harness.complete()
    admitted = [name for plan in harness.plans for name, _ in plan.param_owner]
    assert admitted.index("big") - admitted.index("holder") - 1 == 3
    harness.run()
    harness.check_drained()


def test_a_request_waits_until_its_worst_case_in_pages_is_free() -> None:
    harness = Harness(make_config(num_pages=5, page_size=4, max_num_seqs=2))
    for name in "ab":
        harness.add(name, 9, max_tokens=2)  # 3 pages each, of which the first step takes one
    harness.plan()
    assert (harness.scheduler.num_running, harness.scheduler.num_waiting) == (1, 1)
    harness.complete()
    harness.run()
    for name in "ab":
        harness.check_output(name)
    harness.check_drained()


@pytest.mark.parametrize("swap_pages", [0, 100])
def test_growth_preempts_the_least_important_and_all_end(swap_pages: int) -> None:
    """A pool that one request can fill: the oldest always goes on, so there is no livelock."""
    config = make_config(num_pages=8, max_num_seqs=3, reserve_worst_case=False, swap_pages=swap_pages)
    harness = Harness(config)
    for name in "abc":
        harness.add(name, 8, max_tokens=20)
    harness.run()
    assert harness.scheduler.residency.preemptions > 0
    assert list(harness.reasons) == ["a", "b", "c"]
    for name in "abc":
        harness.check_output(name)
    assert any(plan.swap_out for plan in harness.plans) == (swap_pages > 0)
    harness.check_drained()


def test_a_swapped_request_comes_back_only_after_its_results() -> None:
    """Its sampled token is in the table of a slot it has left; the host must have seen it to send it again."""
    harness = Harness(make_config(depths=1, swap_pages=64, reserve_worst_case=False))
    harness.add("a", 3, max_tokens=6)
    harness.plan()
    harness.scheduler.preempt("a")
    assert harness.plan() is None
    harness.complete()
    plan = harness.plan()
    assert plan is not None
    assert (plan.token_pos, plan.token_id) == ([3], harness.outputs["a"])
    harness.complete()
    harness.run()
    harness.check_output("a")
    harness.check_drained()


@pytest.mark.parametrize("steps", [1, 2])
def test_ordinary_prefill_goes_on_with_a_request_that_left_in_mid_plan(steps: int) -> None:
    harness = Harness(make_config(depths=3, wavefront=False, swap_pages=64, reserve_worst_case=False))
    harness.add("a", 10, max_tokens=3)
    for _ in range(steps):
        harness.plan()
        harness.complete()
    harness.scheduler.preempt("a")
    harness.run()
    assert harness.scheduler.stats.rows == 3 * (10 + 2), "no row was lost or run twice"
    harness.check_output("a")
    harness.check_drained()


def test_a_request_is_not_admitted_on_the_last_pages_of_those_that_grow() -> None:
    """Sixty requests through a pool for twenty: without headroom, most of them would come in only to be preempted."""
    config = make_config(num_pages=60, max_num_seqs=60, reserve_worst_case=False, swap_pages=500, depths=1)
    harness = Harness(config)
    for index in range(60):
        harness.add(str(index), 6, max_tokens=5)
    harness.run()
    assert harness.scheduler.residency.preemptions == 0
    assert max(len(plan.tasks) for plan in harness.plans) > 10
    harness.check_drained()


def test_a_pool_that_holds_everybody_admits_everybody() -> None:
    """Headroom is kept for requests that may grow, not for those that hold all they can need."""
    harness = Harness(make_config(num_pages=12, max_num_seqs=4, reserve_worst_case=False))
    for name in "abcd":
        harness.add(name, 11, max_tokens=2)  # three pages, all of them for the prompt
    harness.plan()
    assert len(harness.running()) == 4
    harness.complete()
    harness.run()
    harness.check_drained()
