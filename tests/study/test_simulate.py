"""Simulation on virtual time: nothing is lost, nothing depends on chance, and small cases equal those made by hand."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from wavegraph.buckets.cost import CostModel, ProgramCost
from wavegraph.buckets.ladder import Ladder
from wavegraph.cli import main
from wavegraph.scheduler.config import SchedulerConfig
from wavegraph.scheduler.plan import StepPlan
from wavegraph.study.latency import Latencies, Percentiles, Timeline
from wavegraph.study.simulate import SimulationResult, attended_positions, simulate
from wavegraph.study.workload import Arrival, Workload

CORE = ProgramCost((1, 2), (1.0, 1.5), (0.0, 0.0), (0, 0))
CODA = ProgramCost((1,), (0.25,), (0.0,), (0,))
COST = CostModel(CORE, CODA, seconds_per_position=0.1, host_seconds=0.5, source="by hand")


def config(workload: Workload, **options: Any) -> SchedulerConfig:
    options = {"depths": 2, "page_size": 4, "max_num_seqs": 3, "max_num_batched_tokens": 8, **options}
    pages = options["max_num_seqs"] * -(-workload.longest // options["page_size"])
    return SchedulerConfig(
        **{"max_model_len": workload.longest, "num_pages": pages, "prefill_chunk_size": 4, **options}
    )


def times(p50: float, p90: float, p99: float) -> Any:
    return pytest.approx(Percentiles(p50, p90, p99).to_dict())


WORKLOADS = st.lists(
    st.builds(Arrival, st.floats(0, 60), st.integers(1, 20), st.integers(1, 6)), min_size=1, max_size=8
).map(lambda requests: Workload("drawn", tuple(requests)))

OPTIONS = st.fixed_dictionaries(
    {"wavefront": st.booleans(), "depths": st.integers(1, 4), "max_num_seqs": st.integers(1, 4)}
)


@given(WORKLOADS, OPTIONS, st.integers(1, 4), st.booleans())
def test_every_request_ends_and_every_token_counts(
    workload: Workload, options: dict[str, Any], run_ahead: int, laddered: bool
) -> None:
    limits = config(workload, **options)
    ladder = Ladder([1, 3, 8]) if laddered else None

    def run() -> SimulationResult:
        return simulate(workload, limits, ladder=ladder, cost=COST, run_ahead=run_ahead, check=True)

    result = run()
    assert result.finished == len(workload.requests)
    assert result.output_tokens == workload.output_tokens
    assert result.prompt_tokens == workload.prompt_tokens
    assert result.rows == limits.depths * (workload.prompt_tokens + workload.output_tokens - len(workload.requests))
    replayed = sum(bucket * hits for bucket, hits in result.bucket_hits.items())
    assert replayed == result.rows + result.padding_rows
    assert result.duration >= max(each.arrival for each in workload.requests)
    assert result.duration * result.output_throughput == pytest.approx(workload.output_tokens)
    host = dict.fromkeys(("host_us_per_step", "host_us_full_step"), 0.0)
    assert replace(run(), **host) == replace(result, **host)


@given(st.lists(st.integers(1, 20), min_size=1, max_size=3), st.integers(1, 6))
def test_planning_ahead_is_never_slower(prompts: list[int], output_tokens: int) -> None:
    workload = Workload.at_once("w", prompts, output_tokens)
    one, two = (simulate(workload, config(workload), cost=COST, run_ahead=ahead).duration for ahead in (1, 2))
    assert two <= one + 1e-9


def test_one_request_by_hand() -> None:
    """Prompt rows attend 1 + 2 positions, decoded ones 3 and 4; CODA follows each of the three steps."""
    workload = Workload.at_once("w", [2], 3)
    steps = [0.5 + 1.5 + 0.3 + 0.25, 0.5 + 1.0 + 0.3 + 0.25, 0.5 + 1.0 + 0.4 + 0.25]
    result = simulate(workload, config(workload, depths=1), cost=COST)
    values = result.as_dict()
    assert result.steps == 3
    assert (values["ttft"], values["e2e"]) == (times(*steps[:1] * 3), times(*[sum(steps)] * 3))
    assert values["itl"] == times(steps[1], steps[2], steps[2])
    assert values["tpot"] == times(*[(steps[1] + steps[2]) / 2] * 3)
    assert result.duration == pytest.approx(sum(steps))
    assert result.prompt_throughput == pytest.approx(2 / sum(steps))
    assert result.output_throughput == pytest.approx(3 / sum(steps))


def test_planning_ahead_hides_the_host_by_hand() -> None:
    """The device runs back to back behind the first plan."""
    workload = Workload.at_once("w", [2], 3)
    values = simulate(workload, config(workload, depths=1), cost=COST, run_ahead=2).as_dict()
    assert values["ttft"] == times(*[2.55] * 3)
    assert values["itl"] == times(1.55, 1.65, 1.65)
    assert values["duration"] == pytest.approx(2.55 + 1.55 + 1.65)


def test_a_slow_host_is_what_bounds_steps_that_are_planned_ahead() -> None:
    workload = Workload.at_once("w", [2], 3)
    slow = replace(COST, host_seconds=10.0)
    values = simulate(workload, config(workload, depths=1), cost=slow, run_ahead=2).as_dict()
    assert values["duration"] == pytest.approx(30 + 1.0 + 0.4 + 0.25)


def test_arrivals_by_hand() -> None:
    """The second request comes while the first one's step runs, the third long after all is done."""
    workload = Workload("w", (Arrival(0, 1, 1), Arrival(0.1, 1, 1), Arrival(100, 1, 1)))
    result = simulate(workload, config(workload, depths=1), cost=COST)
    step = 0.5 + 1.0 + 0.1 + 0.25
    assert result.steps == 3
    assert result.as_dict()["ttft"] == times(step, 2 * step - 0.1, 2 * step - 0.1)
    assert result.duration == pytest.approx(100 + step)


def test_a_run_can_be_cut_short() -> None:
    workload = Workload.at_once("w", [8, 8], 4)
    result = simulate(workload, config(workload), cost=COST, run_ahead=3, max_steps=5)
    assert result.steps == 5
    assert result.finished == 0
    assert simulate(workload, config(workload), cost=COST, max_steps=1).as_dict()["ttft"] is None


def test_prices_are_paid_and_the_cost_is_decided_by() -> None:
    """The scheduler fills the bucket that its cost prefers, whatever the price of it."""
    workload = Workload.at_once("w", [12], 1)
    ladder = Ladder([1, 4, 8])
    limits = config(workload, depths=1, prefill_chunk_size=8, packing="fill")
    dear = CostModel(ProgramCost((1, 4, 8), (1.0, 1.0, 9.0), (0.0,) * 3, (0,) * 3), source="by hand")
    flat = CostModel(ProgramCost((1, 8), (2.0, 2.0), (0.0, 0.0), (0, 0)), source="by hand")
    hits = {4: 3}
    own = simulate(workload, limits, ladder=ladder, cost=dear)
    assert (own.bucket_hits, own.duration) == (hits, pytest.approx(3.0))
    priced = simulate(workload, limits, ladder=ladder, cost=dear, prices=flat)
    assert (priced.bucket_hits, priced.duration) == (hits, pytest.approx(6.0))


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 20)), max_size=5))
def test_attended_positions(spans: list[tuple[int, int]]) -> None:
    plan = StepPlan(0, span_start=[start for start, _ in spans], span_count=[count for _, count in spans])
    assert attended_positions(plan) == sum(p + 1 for start, count in spans for p in range(start, start + count))


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=300))
def test_percentiles_are_values_that_so_many_do_not_exceed(values: list[float]) -> None:
    found = Percentiles.of(values)
    assert found is not None
    for percent, value in ((50, found.p50), (90, found.p90), (99, found.p99)):
        assert value in values
        assert 100 * sum(each <= value for each in values) >= percent * len(values)
        assert 100 * sum(each < value for each in values) < percent * len(values)


def test_requests_without_a_token_have_no_latency() -> None:
    assert Latencies.of([Timeline(0.0)]) == Latencies(None, None, None, None)
    one = Latencies.of([Timeline(1.0, [3.0])])
    assert (one.ttft, one.itl, one.tpot, one.e2e) == (Percentiles(2, 2, 2), None, None, Percentiles(2, 2, 2))


def run_command(*arguments: str) -> dict[str, Any]:
    done = CliRunner().invoke(main, ["simulate", *arguments, "--json", "-"])
    assert done.exit_code == 0, done.output
    values: dict[str, Any] = json.loads(done.stdout)
    return values


def test_the_command_takes_a_workload_and_a_cost(tmp_path: Path) -> None:
    cost, file = tmp_path / "cost.json", tmp_path / "w.jsonl"
    cost.write_text(json.dumps(COST.to_dict()))
    workload = Workload("w", (Arrival(0, 2, 3), Arrival(1.5, 5, 1)))
    workload.write(file)
    values = run_command("--workload", str(file), "--cost", str(cost), "--depths", "1", "--run-ahead", "1")
    assert values["unit"] == "s"
    assert values["finished"] == 2
    expected = simulate(workload, config(workload, depths=1, max_num_seqs=2, prefill_chunk_size=16), cost=COST)
    assert values["duration"] == pytest.approx(expected.duration)
    assert values["ttft"] == pytest.approx(expected.as_dict()["ttft"])


def test_the_command_by_name_and_without_a_cost() -> None:
    values = run_command("--workload", "4x512", "--ladder", "default", "--max-batched-tokens", "256", "--check")
    assert values["unit"] == "cost"
    assert values["rows"] == 4 * 4 * 512
    assert sum(int(bucket) * hits for bucket, hits in values["bucket_hits"].items()) == values["rows"]
    assert values["itl"] is None
    table = CliRunner().invoke(main, ["simulate", "--workload", "4x512"]).stdout
    assert "no cost was measured" in table
    assert "itl  none" in table


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--workload", "chat"], "arrive over time, so their steps need seconds; give --cost FILE"),
        (["--workload", "rfc", "--requests", "4"], "--workload and --requests both say"),
        (["--workload", "nothing"], "neither a file nor one of rfc"),
        (["--cost", "nothing"], "cost model: nothing cannot be read"),
    ],
)
def test_the_command_refuses(arguments: list[str], named: str) -> None:
    done = CliRunner().invoke(main, ["simulate", *arguments])
    assert done.exit_code == 2
    assert named in done.stderr


def test_the_command_refuses_a_workload_that_no_machine_holds(tmp_path: Path) -> None:
    Workload("w", (Arrival(0, 1 << 26, 1),)).write(tmp_path / "w.jsonl")
    done = CliRunner().invoke(main, ["simulate", "--workload", str(tmp_path / "w.jsonl")])
    assert done.exit_code == 2
    assert "are more than the 67108864 tokens" in done.stderr
