"""Steps that fill their buckets, spans that grow, a target for the seconds of a step: limits, bounds, and reasons."""

import math
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.scheduler.harness import Harness, make_config, make_cost
from wavegraph.buckets.assembly import Assembly
from wavegraph.buckets.cost import CostModel, ProgramCost
from wavegraph.buckets.ladder import Ladder
from wavegraph.buckets.optimise import optimise
from wavegraph.errors import ConfigError
from wavegraph.scheduler.lanes import LaneQueue, Taken
from wavegraph.scheduler.order import DecodeFirst, Fifo, Refill, StagePolicy
from wavegraph.scheduler.packing import AUTO_TURN, PATIENCE, attended
from wavegraph.scheduler.plan import ExitRule, Kind, PaddingReason, RequestSpec, StepPlan, StepResult
from wavegraph.scheduler.request import Lane, Request

CPU = make_cost(9e-3, 0.54e-3, top=1024)
ASSUMED = CostModel.assumed(1024)


def rows_of(plan: StepPlan, kind: Kind) -> int:
    return sum(task.token_count for task in plan.tasks if task.kind is kind)


def prefill(lens: list[int], chunk: int | None, budget: int, cost: CostModel, **options: Any) -> tuple[float, Harness]:
    """Predicted seconds of prompts that arrive together, unchecked."""
    config = make_config(
        page_size=16,
        num_pages=sum(-(-length // 16) for length in lens) + len(lens),
        max_model_len=max(lens) + 1,
        max_num_seqs=len(lens),
        max_num_batched_tokens=budget,
        prefill_chunk_size=chunk,
        **{"packing": "fill", **options},
    )
    harness = Harness(config, Ladder.default(budget), cost=cost)
    for index, length in enumerate(lens):
        harness.add(str(index), length)
    seconds = 0.0
    while (plan := harness.scheduler.plan()) is not None:
        harness.scheduler.apply(plan, StepResult(plan.step_id, [0] * len(plan.coda_tasks)))
        seconds += cost.step_seconds(plan.bucket)
    assert harness.scheduler.stats.rows == config.depths * sum(lens)
    return seconds, harness


# -- filling ---------------------------------------------------------------------------------------------------


def saturated(ladder: Ladder, cost: CostModel, seqs: int, chunk: int | None) -> Harness:
    """More requests than slots, of prompts and outputs of many lengths, to their ends."""
    config = make_config(
        packing="fill",
        max_num_batched_tokens=ladder.max,
        max_num_seqs=seqs,
        num_pages=seqs * 32,
        prefill_chunk_size=chunk,
    )
    harness = Harness(config, ladder, cost=cost)
    for index in range(2 * seqs):
        harness.add(str(index), 1 + 37 * index % 60, max_tokens=1 + 11 * index % 20)
    return harness


@settings(max_examples=25)
@given(
    sizes=st.sets(st.integers(1, 31), max_size=11),
    cost=st.sampled_from([CPU, ASSUMED, make_cost(1, 0), make_cost(0, 1)]),
    chunk=st.sampled_from([None, 3, 16]),
)
def test_saturated_load_pads_no_more_than_one_row_in_a_hundred(
    sizes: set[int], cost: CostModel, chunk: int | None
) -> None:
    """Whatever the ladder: while requests wait, there is always enough to fill a bucket."""
    harness = saturated(Ladder({*sizes, 32}), cost, 40, chunk)
    while harness.scheduler.num_waiting:
        plan = harness.scheduler.plan()
        assert plan is not None
        harness.scheduler.apply(plan, StepResult(plan.step_id, harness.tokens(plan)))
    stats = harness.scheduler.stats
    assert stats.padding_rows <= 0.01 * stats.rows


def test_an_optimised_ladder_of_twelve_pads_no_more_than_one_row_in_a_hundred() -> None:
    """Slots are fewer than rows, so that steps of decode rows alone are far from the top; the drain counts too."""
    wanted = saturated(Ladder(range(1, 65)), CPU, 48, None)
    histogram: Counter[int] = Counter()
    while (plan := wanted.scheduler.plan()) is not None:
        wanted.scheduler.apply(plan, StepResult(plan.step_id, wanted.tokens(plan)))
        histogram[plan.rows] += 1
    ladder = optimise(histogram, CPU, max_graphs=12, max_rows=64)
    assert len(ladder.sizes) <= 12
    harness = saturated(ladder, CPU, 48, None)
    harness.run()
    stats = harness.scheduler.stats
    assert stats.padding_rows <= 0.01 * stats.rows
    for name in harness.specs:
        harness.check_output(name)
    harness.check_drained()


def test_decode_rows_fill_a_smaller_bucket_and_take_turns_at_being_left_out() -> None:
    harness = Harness(
        make_config(packing="fill", max_num_seqs=9, num_pages=100, depths=1), Ladder([8, 12, 16]), cost=CPU
    )
    for name in "abcdefghi":
        harness.add(name, 1, max_tokens=40)
    for _ in range(37):
        harness.plan()
        harness.complete()
    assert [plan.bucket for plan in harness.plans] == [12] + [8] * 36, "the prompts, then"
    counts = [len(tokens) for tokens in harness.outputs.values()]
    assert sum(counts) == 9 + 36 * 8
    assert max(counts) - min(counts) <= 2
    harness.run()
    for name in harness.specs:
        harness.check_output(name)


def test_a_span_is_cut_where_the_bucket_ends_and_goes_on_from_there() -> None:
    harness = Harness(make_config(packing="fill", prefill_chunk_size=8, depths=2), Ladder([4, 8, 12, 16]), cost=CPU)
    harness.add("a", 11)
    harness.run()
    spans = [[(t.depth, t.token_start, t.token_count) for t in plan.tasks] for plan in harness.plans]
    assert spans == [[(0, 0, 8)], [(1, 0, 8), (0, 8, 3)], [(1, 8, 3)]]
    harness = Harness(
        make_config(packing="fill", prefill_chunk_size=8, depths=2), Ladder([4, 8, 16]), cost=make_cost(1, 1)
    )
    harness.add("a", 11)
    harness.run()
    spans = [[(t.depth, t.token_start, t.token_count) for t in plan.tasks] for plan in harness.plans]
    assert spans == [[(0, 0, 8)], [(1, 0, 5), (0, 8, 3)], [(1, 5, 3)], [(1, 8, 3)]], "deeper rows give way"


def test_ordinary_prefill_cuts_its_cohort_once_and_fills_all_depths() -> None:
    config = make_config(packing="fill", wavefront=False, prefill_chunk_size=8, depths=3, max_num_seqs=9, num_pages=200)
    harness = Harness(config, Ladder([8, 16]), cost=make_cost(1, 1))
    for index in range(9):
        harness.add(str(index), 19, max_tokens=20)
    harness.run()
    for name in harness.specs:
        harness.check_output(name)
    prompts = [plan for plan in harness.plans if plan.tasks[0].kind is Kind.PROMPT]
    assert [plan.rows for plan in prompts] == [16] * 30 + [11] * 3
    decodes = [plan.rows for plan in harness.plans if plan.tasks[0].kind is Kind.DECODE]
    assert decodes[::3] == decodes[1::3] == decodes[2::3]
    assert Counter(decodes).most_common(1)[0][0] == 8, "nine requests decode, eight at a time"


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("policy", [DecodeFirst(3), Refill(2), Fifo()])
@pytest.mark.parametrize("sizes", [[3, 8], [1, 5, 8], [7, 8]])
def test_a_row_is_left_out_for_a_bounded_number_of_steps(policy: StagePolicy, fused: bool, sizes: list[int]) -> None:
    """docs/architecture.md: as without filling, with the fewest rows of a step that leaves some out for the budget."""
    seqs, depths, chunk = 6, 2, 4
    config = make_config(
        packing="fill",
        stage_policy=policy,
        fused=fused,
        max_num_batched_tokens=8,
        max_num_seqs=seqs,
        num_pages=500,
        max_model_len=400,
        depths=depths,
    )
    ladder, cost = Ladder(sizes), make_cost(1, 1)
    harness = Harness(config, ladder, cost=cost)
    fewest = Assembly(ladder, cost, 8, depths).fewest
    k = {DecodeFirst: 1, Refill: 2, Fifo: math.ceil(seqs * depths * chunk / fewest)}[type(policy)]
    bound = depths * math.ceil(seqs * depths / fewest) * (1 + k)
    harness.add("x", 1, max_tokens=60)
    harness.add("y", 1, max_tokens=60)
    since, longest = 0, 0
    while "x" not in harness.reasons:
        while harness.scheduler.num_waiting < 3:
            harness.add(f"p{len(harness.specs)}", 40)
        assert harness.plan() is not None
        since += 1
        if any(update.request_id == "x" for update in harness.complete()):
            longest, since = max(longest, since), 0
    assert longest <= bound


def test_rows_of_the_next_depth_and_chunk_follow() -> None:
    """A long prompt in chunks of 3 has 6 rows ready at two depths, step after step: a bucket of 4 is filled."""
    config = make_config(packing="fill", prefill_chunk_size=3, depths=2, max_num_batched_tokens=8)
    harness = Harness(config, Ladder([4, 8]), cost=make_cost(0, 1))
    harness.add("a", 60)
    for _ in range(10):
        harness.plan()
        harness.complete()
    assert [plan.rows for plan in harness.plans[1:]] == [4] * 9


def test_lanes_that_gave_all_rows_up_stand_where_they_stood() -> None:
    queue, request = LaneQueue(), Request(RequestSpec("a", [1] * 9, 1), 1, 10, 1)
    lanes = [Lane(request, 0, 0, 1) for _ in range(5)]
    for arrival, lane in enumerate(lanes):
        queue.push(lane, arrival)
    taken: Taken = []
    queue.take(4, 16, lambda _lane, count, _taken: count, taken)
    for lane in lanes[3:0:-1]:
        queue.put_back(lane, 1)
    taken.clear()
    queue.take(9, 16, lambda _lane, count, _taken: count, taken)
    assert [lane for lane, _ in taken] == lanes[1:]


def test_prompts_that_were_left_out_to_fill_a_bucket_are_spared_in_the_next_step() -> None:
    config = make_config(packing="fill", depths=1, max_num_seqs=9, num_pages=300)
    harness = Harness(config, Ladder([8, 16]), cost=make_cost(1, 1))
    for name in "abcdefgh":
        harness.add(name, 1, max_tokens=60)
    harness.plan()
    harness.complete()
    harness.add("p", 4, max_tokens=2)
    harness.plan()
    assert {task.request_id for task in harness.plans[-1].tasks} == set("abcdefgh")
    harness.complete()
    harness.plan()
    assert (harness.plans[-1].rows, harness.plans[-1].bucket) == (8, 8)
    assert rows_of(harness.plans[-1], Kind.PROMPT) == 4, "and decode rows are left out instead"


def test_a_request_that_got_a_page_and_was_left_out_has_nothing_to_swap() -> None:
    """Its row was put back to fill the bucket; preempted then, it starts anew."""
    config = make_config(
        packing="fill", depths=1, max_num_seqs=9, num_pages=300, reserve_worst_case=False, swap_pages=9
    )
    harness = Harness(config, Ladder([1, 8, 16]), cost=make_cost(0, 1))
    for name in "abcdefghi":
        harness.add(name, 1, max_tokens=5)
    plan = harness.plan()
    assert plan is not None
    assert (plan.rows, len(plan.page_id)) == (8, 9)
    assert harness.scheduler.preempt("i")
    harness.complete()
    harness.run()
    assert not any(plan.swap_out for plan in harness.plans)
    for name in harness.specs:
        harness.check_output(name)
    harness.check_drained()


# -- growing ---------------------------------------------------------------------------------------------------

WORKLOADS = {
    "one": [512],
    "one short": [100],
    "four": [512] * 4,
    "four short": [100] * 4,
    "mixed": [40, 700, 130, 300, 20, 20, 55, 410],
}


@pytest.mark.parametrize("cost", [CPU, ASSUMED], ids=["cpu", "assumed"])
@pytest.mark.parametrize("name", WORKLOADS)
def test_auto_is_as_fast_as_the_best_chunk_size_by_prediction(name: str, cost: CostModel) -> None:
    auto, _ = prefill(WORKLOADS[name], None, 256, cost)
    best = min(
        prefill(WORKLOADS[name], chunk, 256, cost, packing=packing)[0]
        for chunk in (8, 16, 32, 64, 128, 256)
        for packing in ("fill", "fifo")
    )
    assert auto <= best / 0.99


def test_one_request_fills_every_step() -> None:
    _, harness = prefill([512], None, 256, CPU)
    assert (harness.scheduler.stats.steps, harness.scheduler.stats.padding_rows) == (8, 0)


def test_each_lane_has_its_turn_before_another_grows() -> None:
    """A short prompt runs beside a long one from the first step on."""
    config = make_config(prefill_chunk_size=None, packing="fill", max_num_batched_tokens=64, num_pages=200)
    harness = Harness(config, Ladder([64]), cost=CPU)
    harness.add("long", 100)
    harness.add("short", 20)
    harness.plan()
    counts = {task.request_id: task.token_count for task in harness.plans[0].tasks}
    assert counts == {"long": 64 - AUTO_TURN, "short": AUTO_TURN}
    harness.complete()
    harness.run()
    harness.check_drained()


def test_spans_grow_into_the_lowest_depths_first_and_never_join_prompt_and_output() -> None:
    config = make_config(prefill_chunk_size=None, packing="fill", max_num_batched_tokens=64, num_pages=200)
    harness = Harness(config, Ladder([64]), cost=CPU)
    harness.add("a", 120)
    harness.run()
    spans = [[(t.depth, t.token_count) for t in plan.tasks] for plan in harness.plans[:3]]
    assert spans == [[(0, 64)], [(1, 16), (0, 48)], [(2, 16), (1, 40), (0, 8)]]


def test_without_filling_spans_grow_too() -> None:
    _, harness = prefill([300], None, 64, CPU, packing="fifo")
    assert harness.scheduler.stats.steps == 19


# -- a target --------------------------------------------------------------------------------------------------

COST = make_cost(4e-3, 1e-3, per_position=1e-6, coda=0.5e-3)


def paced(target: float | None, *, decodes: int = 3, **options: Any) -> Harness:
    """Some requests decode, and a long prompt has just come."""
    config = make_config(
        **{
            "packing": "fill",
            "prefill_chunk_size": None,
            "max_num_seqs": 8,
            "num_pages": 400,
            "depths": 2,
            "max_num_batched_tokens": 64,
            "max_model_len": 400,
            "target_step_seconds": target,
            **options,
        }
    )
    harness = Harness(config, Ladder([1, 2, 4, 8, 16, 32, 64]), Ladder.default(8), COST)
    for index in range(decodes):
        harness.add(f"d{index}", 1, max_tokens=150)
    while decodes and len(harness.outputs["d0"]) < 2:
        harness.plan()
        harness.complete()
    harness.add("long", 200)
    return harness


def seconds_of(plan: StepPlan) -> float:
    positions = sum(attended(task.token_start, task.token_count) for task in plan.tasks)
    return COST.step_seconds(plan.bucket, positions, plan.coda_bucket)


def run_until(harness: Harness, name: str) -> list[StepPlan]:
    first = len(harness.plans)
    while name not in harness.reasons:
        assert harness.plan() is not None
        harness.complete()
    return harness.plans[first:]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("packing", ["fill", "fifo"])
@pytest.mark.parametrize("chunk", [None, 8, 64])
@pytest.mark.parametrize("policy", [DecodeFirst(3), Refill(2), Fifo()])
def test_a_target_bounds_the_predicted_seconds_of_every_step_with_a_prompt(
    fused: bool, packing: str, chunk: int | None, policy: StagePolicy
) -> None:
    harness = paced(0.030, fused=fused, packing=packing, prefill_chunk_size=chunk, stage_policy=policy)
    plans = run_until(harness, "long")
    assert max(seconds_of(plan) for plan in plans) <= 0.030
    if fused:
        prompts = [plan for plan in plans if rows_of(plan, Kind.PROMPT)]
        assert all(rows_of(plan, Kind.DECODE) for plan in prompts), "decode rows ran in every step"
        assert len(prompts) == len(plans)
    harness.run()
    harness.check_drained()


def test_a_target_takes_what_it_can() -> None:
    """A bucket of 16 rows takes 20 ms and more, one of 32 would take 36 ms."""
    plans = run_until(paced(0.030), "long")
    assert [(plan.rows, plan.bucket) for plan in plans[:10]] == [(16, 16)] * 10


def test_attended_positions_count_against_the_target() -> None:
    """4 + 16 ms for a bucket of 16, 4 x 0.5 ms for tokens, and 1 ms for positions at 1 us each."""
    harness = paced(0.023)
    plans = run_until(harness, "long")
    rows = [rows_of(plan, Kind.PROMPT) for plan in plans if plan.bucket == 16]
    assert rows[0] > min(rows) > 0, "later positions attend more"
    assert harness.scheduler.stats.padding_reasons["latency target"] > 0


@pytest.mark.parametrize("fused", [False, True])
def test_a_target_that_cannot_be_met_lets_prompts_through_now_and_then(fused: bool) -> None:
    harness = paced(0.001, fused=fused)
    plans = run_until(harness, "long")
    waits, since = [], 0
    for plan in plans:
        prompts = rows_of(plan, Kind.PROMPT)
        assert prompts <= AUTO_TURN
        since = 0 if prompts else since + 1
        waits.append(since)
    assert max(waits) <= PATIENCE
    assert len(plans) <= (PATIENCE + 1) * math.ceil(2 * 200 / (AUTO_TURN / 2))


def test_decode_rows_that_fill_the_budget_leave_prompts_a_turn_now_and_then() -> None:
    harness = paced(0.001, decodes=6, max_num_batched_tokens=4, prefill_chunk_size=2)
    plans = run_until(harness, "long")
    assert max(len(list(group)) for group in _runs_without_prompt(plans)) <= PATIENCE


def _runs_without_prompt(plans: list[StepPlan]) -> list[list[StepPlan]]:
    runs: list[list[StepPlan]] = [[]]
    for plan in plans:
        if rows_of(plan, Kind.PROMPT):
            runs.append([])
        else:
            runs[-1].append(plan)
    return runs


def test_decode_rows_give_way_to_no_bucket_while_a_target_is_in_force() -> None:
    """By the rate of live rows, four of the five would run at a time."""
    for prompt in (False, True):
        harness = paced(0.030, decodes=5)
        if not prompt:
            harness.cancel("long")
        for _ in range(20):
            plan = harness.plan()
            assert plan is not None
            assert rows_of(plan, Kind.DECODE) == 5
            harness.complete()


def test_coda_rows_that_prompts_are_scored_by_count_against_the_target() -> None:
    """20 ms for 16 rows, and 4 ms for 8 coda rows, which the scored prompt fills: the checker knows them."""
    harness = paced(0.0235)
    harness.add("scored", 60, score_prompt=True)
    plans = run_until(harness, "scored")
    assert max(len(plan.coda_tasks) for plan in plans) == 8
    assert max(seconds_of(plan) for plan in plans) <= 0.0235


def test_without_live_decodes_the_target_is_not_in_force() -> None:
    harness = paced(0.001, decodes=0)
    assert {plan.rows for plan in run_until(harness, "long")} >= {64}


def test_a_request_that_decodes_no_more_does_not_hold_prompts_up() -> None:
    harness = paced(0.030, decodes=1)
    while "d0" not in harness.reasons:
        harness.plan()
        harness.complete()
    harness.add("other", 200)
    assert {plan.rows for plan in run_until(harness, "other")} >= {64}


def test_a_target_needs_measured_costs() -> None:
    config = make_config(target_step_seconds=0.01)
    for cost in (None, CostModel.assumed(16)):
        with pytest.raises(ConfigError, match="target_itl_ms: needs measured costs"):
            Harness(config, Ladder([16]), cost=cost)
    Harness(config, Ladder([16]), cost=CPU)


@given(st.integers(0, 50), st.integers(0, 50))
def test_attended_positions(start: int, count: int) -> None:
    assert attended(start, count) == sum(position + 1 for position in range(start, start + count))


# -- reasons ---------------------------------------------------------------------------------------------------


def reasons(harness: Harness) -> dict[str, int]:
    """Padding rows by reason, after the run; their sum is checked."""
    harness.run()
    stats = harness.scheduler.stats
    assert sum(stats.padding_reasons.values()) == stats.padding_rows
    counted: Counter[str] = Counter()
    for plan in harness.plans:
        assert bool(plan.padding_reason) == (plan.bucket > plan.rows)
        counted[plan.padding_reason] += plan.bucket - plan.rows
    del counted[PaddingReason.NONE]
    assert counted == stats.padding_reasons
    return dict(stats.padding_reasons)


def one_prompt(length: int, sizes: list[int], max_tokens: int = 1, **options: Any) -> Harness:
    options = {
        "packing": "fill",
        "depths": 1,
        "prefill_chunk_size": None,
        "max_num_batched_tokens": max(sizes),
        **options,
    }
    harness = Harness(make_config(**options), Ladder(sizes), cost=CPU)
    harness.add("a", length, max_tokens)
    return harness


@pytest.mark.parametrize(
    ("harness", "expected"),
    [
        (one_prompt(5, [8]), {PaddingReason.SMALLEST: 3}),
        (one_prompt(5, [4, 6]), {PaddingReason.DRAIN: 1}),
        (one_prompt(5, [4, 6], packing="fifo"), {PaddingReason.FIFO: 1}),
        (one_prompt(6, [4], max_num_batched_tokens=3), {PaddingReason.BUDGET: 2}),
        (one_prompt(6, [4], prefill_chunk_size=3), {PaddingReason.CHUNK: 1, PaddingReason.SMALLEST: 1}),
    ],
)
def test_why_a_step_was_padded(harness: Harness, expected: dict[PaddingReason, int]) -> None:
    assert reasons(harness) == expected


def test_padding_for_the_rate_of_live_rows() -> None:
    harness = Harness(make_config(packing="fill", depths=1, max_num_batched_tokens=4), Ladder([2, 4]), cost=CPU)
    for name in "abc":
        harness.add(name, 1, max_tokens=6)
    assert reasons(harness) == {PaddingReason.RATE: 5, PaddingReason.DRAIN: 1}


def test_padding_beside_rows_of_the_other_kind() -> None:
    harness = Harness(make_config(packing="fill", depths=1, fused=False), Ladder([4, 16]), cost=CPU)
    harness.add("a", 1, max_tokens=3)
    harness.plan()
    harness.complete()
    harness.add("b", 8)
    harness.plan()
    assert harness.plans[-1].padding_reason is PaddingReason.KIND


def test_padding_for_want_of_pages() -> None:
    """Two requests decode; the pool's last page goes to the more important one."""
    config = make_config(packing="fill", depths=1, num_pages=3, page_size=2, max_num_seqs=2, reserve_worst_case=False)
    harness = Harness(config, Ladder([2, 16]), cost=CPU)
    harness.add("a", 2, max_tokens=4)
    harness.add("b", 2, max_tokens=3)
    assert PaddingReason.PAGES in reasons(harness)


def test_padding_of_a_cohort_that_members_left() -> None:
    config = make_config(packing="fill", depths=3, wavefront=False, max_num_batched_tokens=6)
    harness = Harness(config, Ladder([2, 4, 6]), cost=CPU)
    harness.add("a", 2)
    harness.add("b", 3)
    harness.plan()
    harness.cancel("a")
    assert reasons(harness) == {PaddingReason.DRAIN: 1, PaddingReason.COHORT: 2}


def test_the_depths_of_a_cohort_have_the_reason_of_its_first() -> None:
    assert reasons(one_prompt(5, [8], wavefront=False, depths=3)) == {PaddingReason.SMALLEST: 9}


def test_a_larger_bucket_that_is_cheaper_is_taken() -> None:
    odd = CostModel(ProgramCost((4, 8), (2.0, 1.0), (0.0, 0.0), (0, 0)))
    harness = Harness(make_config(packing="fill", depths=1, max_num_batched_tokens=8), Ladder([4, 8]), cost=odd)
    harness.add("a", 3)
    harness.run()
    assert harness.plans[0].bucket == 8


# -- everything ------------------------------------------------------------------------------------------------


@given(
    lens=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    max_tokens=st.integers(1, 5),
    chunk=st.none() | st.integers(1, 9),
    sizes=st.sets(st.integers(1, 20), min_size=1, max_size=5),
    mode=st.sampled_from(["ordinary", "separate", "fused"]),
    ahead=st.integers(1, 3),
    target=st.none() | st.floats(0, 40),
    exits=st.booleans(),
)
def test_any_workload_does_each_row_once_and_comes_to_its_end(
    lens: list[int],
    max_tokens: int,
    chunk: int | None,
    sizes: set[int],
    mode: str,
    ahead: int,
    target: float | None,
    exits: bool,
) -> None:
    config = make_config(
        packing="fill",
        prefill_chunk_size=chunk,
        max_num_batched_tokens=max(sizes),
        wavefront=mode != "ordinary",
        fused=mode == "fused",
        target_step_seconds=target,
    )
    harness = Harness(config, Ladder(sizes), cost=make_cost(4, 1, 0.1))
    for index, length in enumerate(lens):
        rule = ExitRule(2, 0, gated=True) if exits and index % 2 else None
        harness.add(str(index), length, max_tokens, exit_rule=rule)
    while True:
        while len(harness.in_flight) < ahead and harness.plan() is not None:
            pass
        if not harness.in_flight:
            break
        harness.complete()
    for request_id in harness.specs:
        harness.check_output(request_id)
    if not exits:
        assert harness.scheduler.stats.rows == 4 * sum(length + max_tokens - 1 for length in lens)
    harness.check_drained()
