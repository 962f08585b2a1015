import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.scheduler.harness import Harness, make_config, token_at
from wavegraph.buckets.ladder import Ladder
from wavegraph.errors import EngineError, RequestError
from wavegraph.scheduler.order import Fifo
from wavegraph.scheduler.plan import ExitPolicy, Kind, Phase, RequestSpec, StepPlan, StepResult, TaskState


def spans(plan: StepPlan) -> list[tuple[str, int, int, int]]:
    return [(t.request_id, t.depth, t.token_start, t.token_count) for t in plan.tasks]


def run_plans(harness: Harness) -> list[list[tuple[str, int, int, int]]]:
    harness.run()
    return [spans(plan) for plan in harness.plans]


def test_one_prompt_moves_as_a_wavefront() -> None:
    harness = Harness(make_config(depths=3))
    harness.add("a", 10)
    assert run_plans(harness) == [
        [("a", 0, 0, 4)],
        [("a", 1, 0, 4), ("a", 0, 4, 4)],
        [("a", 2, 0, 4), ("a", 1, 4, 4), ("a", 0, 8, 2)],
        [("a", 2, 4, 4), ("a", 1, 8, 2)],
        [("a", 2, 8, 2)],
    ]
    assert [len(plan.coda_tasks) for plan in harness.plans] == [0, 0, 0, 0, 1]


def test_ordinary_prefill_runs_all_depths_of_a_chunk_back_to_back() -> None:
    harness = Harness(make_config(depths=2, wavefront=False))
    harness.add("a", 6)
    harness.add("b", 3)
    assert run_plans(harness) == [
        [("a", 0, 0, 4), ("b", 0, 0, 3)],
        [("a", 1, 0, 4), ("b", 1, 0, 3)],
        [("a", 0, 4, 2)],
        [("a", 1, 4, 2)],
    ]


def test_ordinary_prefill_holds_no_decode_rows_and_neither_kind_starves() -> None:
    harness = Harness(make_config(depths=2, wavefront=False, prefill_chunk_size=2, stage_policy=Fifo()))
    harness.add("a", 2, max_tokens=4)
    harness.add("b", 40)
    harness.run()
    assert all(len({task.kind for task in plan.tasks}) == 1 for plan in harness.plans)
    a_ends = max(i for i, plan in enumerate(harness.plans) if any(t.request_id == "a" for t in plan.tasks))
    b_ends = max(i for i, plan in enumerate(harness.plans) if any(t.request_id == "b" for t in plan.tasks))
    assert a_ends < b_ends, "four decode tokens waited for twenty chunks of another prompt"


def test_decode_goes_through_all_depths_of_each_token() -> None:
    harness = Harness(make_config(depths=2))
    harness.add("a", 1, max_tokens=3)
    assert run_plans(harness) == [[("a", d, p, 1)] for p in range(3) for d in range(2)]
    assert harness.reasons["a"] == "length"
    kinds = [plan.tasks[0].kind for plan in harness.plans]
    assert kinds == [Kind.PROMPT, Kind.PROMPT, Kind.DECODE, Kind.DECODE, Kind.DECODE, Kind.DECODE]


def test_tasks_carry_the_rfc_s_generalised_form() -> None:
    harness = Harness(make_config(depths=2, page_size=4))
    harness.add("a", 6, max_tokens=2)
    harness.run()
    first = harness.plans[0].tasks[0]
    assert (first.phase, first.depth, first.exit_policy) == (Phase.COMPOSITE_DEPTH0, 0, ExitPolicy.FULL_DEPTH)
    assert first.pages == harness.plans[0].page_id
    assert first.state is TaskState.COMPLETED
    second = harness.plans[1].tasks[0]
    assert (second.phase, second.depth, second.position, second.token_end) == (Phase.RECURRENT, 1, 0, 4)
    decode = harness.plans[-1].tasks[-1]
    assert (decode.kind, decode.exit_policy) == (Kind.DECODE, ExitPolicy.DECODE_DEPTH)
    ids = [task.task_id for plan in harness.plans for task in (*plan.tasks, *plan.coda_tasks)]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize(
    ("chunk", "ordinary", "wavefront"), [(16, 2016, 507), (32, 1008, 255), (64, 504, 129), (128, 252, 127)]
)
def test_rfc_case_to_the_row(chunk: int, ordinary: int, wavefront: int) -> None:
    """RFC: 4 requests x 8,064 tokens under a budget of 1,024 rows; 254.49 rows a step at chunk 16."""
    steps = {}
    for mode in (False, True):
        config = make_config(
            page_size=16,
            num_pages=4 * 504,
            max_model_len=8065,
            max_num_batched_tokens=1024,
            prefill_chunk_size=chunk,
            wavefront=mode,
        )
        harness = Harness(config)
        for name in "abcd":
            harness.add(name, 8064)
        while (plan := harness.scheduler.plan()) is not None:
            harness.scheduler.apply(plan, StepResult(plan.step_id, [0] * len(plan.coda_tasks)))
        stats = harness.scheduler.stats
        assert stats.rows == 4 * 8064 * 4
        steps[mode] = stats.steps
    assert steps == {False: ordinary, True: wavefront}


def test_budget_cuts_a_span_and_it_keeps_its_place() -> None:
    harness = Harness(make_config(depths=1, max_num_batched_tokens=6))
    harness.add("a", 4)
    harness.add("b", 4)
    harness.add("c", 4)
    assert run_plans(harness) == [[("a", 0, 0, 4), ("b", 0, 0, 2)], [("b", 0, 2, 2), ("c", 0, 0, 4)]]


def test_buckets_come_from_the_ladder() -> None:
    harness = Harness(make_config(), Ladder([2, 8, 16]), Ladder([3, 4]))
    harness.add("a", 5)
    harness.run()
    assert [(plan.rows, plan.bucket) for plan in harness.plans] == [(4, 8), (5, 8), (5, 8), (5, 8), (1, 2)]
    assert [plan.coda_bucket for plan in harness.plans] == [0, 0, 0, 0, 3]
    assert harness.scheduler.stats.padding_rows == 4 + 3 * 3 + 1
    assert harness.scheduler.stats.coda_padding_rows == 2


def test_plans_run_ahead_of_results_and_a_late_stop_voids_them() -> None:
    """Decode steps planned before the stop token was seen are dropped, and no token is doubled."""
    harness = Harness(make_config(depths=1))
    stop = frozenset({token_at("a", 3)})
    harness.add("a", 2, max_tokens=9, stop=stop)
    for _ in range(6):
        assert harness.plan() is not None
    while harness.in_flight:
        harness.complete()
    assert harness.reasons["a"] == "stop"
    harness.check_output("a")
    assert harness.plans[-1].tasks[0].state is TaskState.CANCELLED
    harness.check_drained()


def test_tokens_whose_results_come_out_of_order_are_delivered_in_order() -> None:
    harness = Harness(make_config(depths=1))
    harness.add("a", 2, max_tokens=4)
    for _ in range(4):
        harness.plan()
    assert [len(harness.complete(index)) for index in (2, 1, 0, 0)] == [0, 0, 3, 1]
    harness.check_output("a")


def test_a_token_that_arrived_before_the_stop_ahead_of_it_is_dropped() -> None:
    harness = Harness(make_config(depths=1))
    harness.add("a", 2, max_tokens=9, stop=frozenset({token_at("a", 2)}))
    harness.plan()
    harness.plan()
    harness.complete(1)
    assert [update.finish_reason for update in harness.complete(0)] == ["stop"]
    harness.check_output("a")
    harness.check_drained()


def test_out_of_order_final_depth_completion() -> None:
    harness = Harness(make_config(depths=1, max_num_batched_tokens=4, num_pages=64))
    harness.add("a", 16, max_tokens=2)
    for _ in range(4):
        harness.plan()
    prefilled = []
    for index in (2, 1, 0):
        harness.complete(index)
        prefilled.append(harness.scheduler.num_prefilled_tokens("a"))
    assert prefilled == [0, 0, 12]


def test_cancelled_pages_are_reused_at_once_and_late_results_dropped() -> None:
    harness = Harness(make_config(num_pages=2, max_model_len=9))
    harness.add("a", 8)
    harness.add("b", 8)
    harness.plan()
    harness.cancel("a")
    plan = harness.plan()
    assert plan is not None
    assert {task.request_id for task in plan.tasks} == {"b"}
    harness.complete()
    assert harness.plans[0].tasks[0].state is TaskState.CANCELLED
    harness.complete()
    harness.run()
    assert harness.reasons["b"] == "length"
    harness.check_drained()


def test_an_id_may_be_used_again_at_once() -> None:
    harness = Harness(make_config())
    harness.add("a", 8)
    harness.plan()
    harness.cancel("a")
    harness.add("a", 5)
    harness.plan()
    harness.complete()
    harness.complete()
    harness.run()
    harness.check_output("a")
    assert harness.reasons["a"] == "length"
    harness.check_drained()


def test_failed_step_ends_its_requests_only() -> None:
    harness = Harness(make_config(max_num_batched_tokens=4))
    harness.add("a", 4)
    harness.add("b", 4)
    plan = harness.plan()
    assert plan is not None
    assert harness.fail_newest() == ["a"]
    harness.run()
    assert harness.reasons == {"a": "failed", "b": "length"}
    harness.check_drained()


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (RequestSpec("x", [], 1), "empty"),
        (RequestSpec("x", [1] * 128, 1), "max_model_len=128"),
        (RequestSpec("x", [1], 0), "max_tokens"),
        (RequestSpec("x", [1], -3), "max_tokens"),
        (RequestSpec("x", [1] * 100, 27), "32 KV pages"),
        (RequestSpec("live", [1], 1), "already in use"),
    ],
)
def test_requests_that_cannot_be_served_are_refused_at_once(spec: RequestSpec, words: str) -> None:
    harness = Harness(make_config(num_pages=31))
    harness.add("live", 4)
    with pytest.raises(RequestError, match=words):
        harness.scheduler.add(spec)
    harness.run()
    assert harness.reasons == {"live": "length"}


def test_the_largest_request_that_fits_is_served() -> None:
    harness = Harness(make_config(num_pages=31))
    harness.add("a", 100, max_tokens=25)  # 124 positions need KV: 31 pages
    harness.run()
    harness.check_output("a")
    harness.check_drained()


def test_output_ends_at_max_model_len() -> None:
    harness = Harness(make_config(max_model_len=8))
    harness.add("a", 6, max_tokens=50)
    harness.run()
    assert (len(harness.outputs["a"]), harness.reasons["a"]) == (2, "length")


def test_result_of_another_step_is_refused() -> None:
    harness = Harness(make_config())
    harness.add("a", 4)
    plan = harness.plan()
    assert plan is not None
    with pytest.raises(EngineError, match="does not answer"):
        harness.scheduler.apply(plan, StepResult(plan.step_id + 1, []))
    with pytest.raises(EngineError, match="does not answer"):
        harness.scheduler.apply(plan, StepResult(plan.step_id, [5]))


@given(
    lens=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    max_tokens=st.integers(1, 5),
    depths=st.integers(1, 5),
    chunk=st.integers(1, 9),
    budget=st.integers(1, 20),
    seqs=st.integers(1, 4),
    wavefront=st.booleans(),
)
def test_any_workload_does_each_row_once(
    lens: list[int], max_tokens: int, depths: int, chunk: int, budget: int, seqs: int, wavefront: bool
) -> None:
    config = make_config(
        depths=depths,
        prefill_chunk_size=chunk,
        max_num_batched_tokens=budget,
        max_num_seqs=seqs,
        wavefront=wavefront,
    )
    harness = Harness(config)
    for index, length in enumerate(lens):
        harness.add(str(index), length, max_tokens)
    harness.run()
    for request_id in harness.specs:
        harness.check_output(request_id)
    assert harness.scheduler.stats.rows == depths * sum(length + max_tokens - 1 for length in lens)
    harness.check_drained()


@given(
    lens=st.lists(st.integers(1, 60), min_size=2, max_size=4),
    chunk=st.integers(1, 8),
    budget=st.integers(1, 32),
)
def test_fifo_serves_every_ready_lane_within_its_bound(lens: list[int], chunk: int, budget: int) -> None:
    """No lane waits longer than the rows queued ahead of it allow (`FifoOrder`)."""
    config = make_config(prefill_chunk_size=chunk, max_num_batched_tokens=budget, num_pages=200, stage_policy=Fifo())
    harness = Harness(config)
    for index, length in enumerate(lens):
        harness.add(str(index), length, max_tokens=3)
    bound = -(-len(lens) * config.depths * chunk // budget) + 1
    last_seen = dict.fromkeys(harness.specs, 0)
    while (plan := harness.plan()) is not None:
        for name in {task.request_id for task in plan.tasks}:
            last_seen[name] = plan.step_id
        harness.complete()
        for name in harness.running():
            assert plan.step_id - last_seen[name] <= bound
