"""The benchmarks run, say what they measured, and compare things that compute the same."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from wavegraph.bench.eager import EagerCore
from wavegraph.bench.replay import _executor, _set_rows
from wavegraph.bench.shape import Shape
from wavegraph.bench.shared_engine import Run, SharedEngine, Watch
from wavegraph.bench.step import _Variant
from wavegraph.buckets.cost import CostModel
from wavegraph.buckets.samples import Point
from wavegraph.cli import main
from wavegraph.model.weights import RopeTables
from wavegraph.scheduler.plan import Kind
from wavegraph.startup.backend_choice import make_runner
from wavegraph.study.measure import Times, interleaved
from wavegraph.study.workload import Arrival, Workload

SIZES = ["--hidden", "64", "--layers", "2", "--heads", "2", "--head-dim", "32", "--inner", "96", "--repeats", "1"]


@pytest.fixture(autouse=True)
def _small_machine_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wavegraph.study.measure.READ_BYTES", 1 << 16)
    monkeypatch.setattr("wavegraph.study.measure.MATRIX_SIZE", 32)


def run(*arguments: str) -> tuple[str, dict[str, Any]]:
    """Table and JSON of a run."""
    result = CliRunner().invoke(main, ["bench", *arguments])
    assert result.exit_code == 0, result.output
    *table, last = result.stdout.splitlines()
    facts: dict[str, Any] = json.loads(last)
    assert {"cpu", "threads", "torch", "wavegraph", "commit"} <= facts.keys()
    return "\n".join(table), facts


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows", [1, 4, 12])
def test_both_sides_compute_the_same(rows: int, dtype: str) -> None:
    """A replay from embedded tokens, and the eager modules from the same rows, keys and values."""
    shape = Shape(hidden=64, layers=2, heads=2, head_dim=32, inner=96, context=20, chunk=4, page_size=8, dtype=dtype)
    executor, weights = _executor(shape, [1, 4, 12], make_runner("compiled", shape.torch_dtype))
    executor.capture()
    _set_rows(executor, shape, rows)
    slots, chunk = -(-rows // 4), min(rows, 4)
    executor.io.token_table.random_(0, 256)
    rope = RopeTables.build(shape.config(), shape.context, shape.torch_dtype)
    core = EagerCore(shape, weights, rope.cos, rope.sin, rows)
    tokens = executor.io.token_table[:slots, 20 - chunk : 20].long()
    core.x = weights["model.embed_tokens.weight"][tokens]
    pages = executor.io.page_table[:slots].long()
    for index, layer in enumerate(core.layers):
        for name, pool in (("keys", executor.pools.k), ("values", executor.pools.v)):
            getattr(layer, name).copy_(pool[pages, 0, index].flatten(1, 2)[:, :20].transpose(1, 2))
    executor.core.replay(rows, rows)
    hidden = executor.pools.hidden[pages].flatten(1, 2)[:, 20 - chunk : 20]
    tolerance = 1e-4 if dtype == "float32" else 0.1
    torch.testing.assert_close(hidden.float(), core().float(), rtol=0, atol=tolerance)
    assert hidden.abs().max() > 1


def test_replay(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    table, facts = run("replay", *SIZES, "--rows", "1,8", "--chunk", "4", "--context", "12", "--json", str(file))
    assert json.loads(file.read_text()) == facts
    assert [row["rows"] for row in facts["rows"]] == [1, 8]
    for row in facts["rows"]:
        assert row["ratio"] == pytest.approx(row["eager_ms"]["median"] / row["replay_ms"]["median"])
        assert row["tflops"] * 1e3 == pytest.approx(row["rows"] * row["weights_gbs"])  # 2 operations, 2 bytes a weight
    assert facts["backend"] == "compiled"
    assert f"memory read {facts['read_gbs']:.1f} GB/s" in table


def test_attention() -> None:
    _, facts = run("attention", *SIZES, "--contexts", "8,40", "--rows", "4", "--dtype", "float32")
    assert [row["context"] for row in facts["contexts"]] == [8, 40]
    assert all(row["largest_difference"] < 1e-5 for row in facts["contexts"])


def test_prefill(tmp_path: Path) -> None:
    file = tmp_path / "mixed.jsonl"
    file.write_text('{"arrival": 0, "prompt_tokens": 48, "output_tokens": 9}\n' * 2)
    limits = [
        "--depths",
        "3",
        "--max-batched-tokens",
        "64",
        "--packing",
        "fifo",
        "--workload",
        f"1x24,{file}",
        "--chunks",
        "8,4,auto",
    ]
    _, facts = run("prefill", *SIZES, *limits, "--scale", "0.5")
    assert [(each["requests"], each["prompt_tokens"]) for each in facts["workloads"]] == [(1, 12), (2, 48)]
    for table, requests in zip(facts["workloads"], (1, 2), strict=True):
        rows = {(row["chunk"], row["wavefront"]): row for row in table["variants"]}
        assert rows[4, False]["rows_per_step"] == 4 * requests
        assert rows[4, True]["rows_per_step"] > rows[4, False]["rows_per_step"]
        assert rows[8, False]["over_ordinary"] == 1
        assert max(row["of_best"] for row in rows.values()) == 1
        for row in rows.values():
            assert row["prompt_tokens_per_s"] == pytest.approx(table["prompt_tokens"] / row["ms"]["median"] * 1e3)
            assert row["error"] == pytest.approx(row["predicted_ms"] / row["ms"]["median"] - 1)
        predicted = rows[4, False]["predicted_ms"]
        replays = CostModel.from_dict(facts["cost"]).step_seconds(4 * requests) * rows[4, False]["steps"] * 1e3
        assert predicted > 0.5 * replays  # steps of equal rows, whose host time may be hidden


@pytest.mark.parametrize("span_rows", [1, 5, 99])
def test_the_cost_is_that_of_replays_and_leaves_the_engine_as_it_was(span_rows: int) -> None:
    """Requests decode the same tokens after replays on made-up rows; a bucket's positions are those of its rows."""
    shape = Shape(hidden=64, layers=1, heads=2, head_dim=32, inner=64, vocab=64, page_size=8, dtype="float32")
    shared = SharedEngine(shape, 2, 24, 16, 3, "auto", span_rows)
    config, workload = shared.variant(prefill_chunk_size=4), Workload.at_once("w", [5, 20, 17, 3], 4)
    before = shared.run(config, workload)
    for _ in range(3):
        shared.measure_cost()
    after = shared.run(config, workload)
    assert [before.outputs[name].token_ids for name in "0123"] == [after.outputs[name].token_ids for name in "0123"]
    cost = shared.facts()["cost"]
    assert cost["core"]["rows"] == shared.engine.sizes.ladder.sizes
    assert cost["coda"]["rows"] == shared.engine.sizes.coda_ladder.sizes
    assert cost["host_seconds"] > 0
    assert all(seconds > 0 for seconds in cost["coda"]["seconds"])
    for rows in shared.engine.sizes.ladder.sizes:
        positions = shared._meter._prepare(Point("core", rows, 24))
        shared.engine.executor.core.replay(rows, rows)
        io = shared.engine.executor.io
        assert int(io.row_pos[:rows].sum()) + rows == positions
        assert int(io.row_pos[:rows].max()) == 23
        places = set(zip(*(field[:rows].tolist() for field in (io.row_slot, io.row_pos, io.row_depth)), strict=True))
        assert len(places) == rows
        spans = len(set(zip(io.row_slot[:rows].tolist(), io.row_depth[:rows].tolist(), strict=True)))
        assert spans == min(6, -(-rows // min(span_rows, 24)))
    shared.close()


@pytest.mark.parametrize("options", [{}, {"packing": "fifo", "prefill_chunk_size": 4}, {"wavefront": False}])
def test_a_simulation_takes_the_steps_of_the_engine(options: dict[str, Any]) -> None:
    """Planning ahead included: requests that wait are admitted as late as in the engine."""
    shape = Shape(hidden=64, layers=1, heads=2, head_dim=32, inner=64, vocab=64, page_size=8, dtype="float32")
    shared = SharedEngine(shape, 3, 40, 24, 2, "auto", 1)
    config = shared.variant(**options)
    workload = Workload("w", tuple(Arrival(0, length, 1 + length % 5) for length in (30, 3, 17, 1, 24, 8)))
    shared.measure_cost()
    run, simulated = shared.run(config, workload), shared._simulate(config, workload)
    assert (run.steps, run.rows, run.padding_rows) == (simulated.steps, simulated.rows, simulated.padding_rows)
    assert sum(len(each.tokens) for each in run.timelines.values()) == simulated.output_tokens
    assert simulated.unit == "s"
    shared.close()


def test_prefill_stops_at_a_token_that_depends_on_the_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = iter(range(100))
    result = Watch.result

    def changed(watch: Watch) -> Run:
        run = result(watch)
        outputs = {name: replace(each, token_ids=(next(tokens),)) for name, each in run.outputs.items()}
        return replace(run, outputs=outputs)

    monkeypatch.setattr(Watch, "result", changed)
    done = CliRunner().invoke(main, ["bench", "prefill", *SIZES, "--workload", "1x8", "--chunks", "4"])
    assert done.exit_code == 1
    assert "1x8: first tokens differ between schedules" in done.stderr


def test_step() -> None:
    table, facts = run("step", "--spans", "2,4", "--waiting", "0,3", "--steps", "20", "--no-async")
    assert [(row["spans"], row["running"], row["waiting"]) for row in facts["steps"]] == [
        (2, 4, 0), (2, 4, 3), (4, 8, 0), (4, 8, 3),
    ]  # fmt: skip
    for row in facts["steps"]:
        whole, parts = row["step_cpu_us"], [row[f"{name}_us"]["median"] for name in ("plan", "submit", "poll", "apply")]
        assert 0 < whole["low"] <= whole["median"] <= whole["high"]
        assert all(part > 0 for part in parts)
        assert row["pack_us"]["median"] > 0
    assert "wall us" in table


@pytest.mark.parametrize("asynchronous", [True, False])
def test_steps_are_full_until_the_end(asynchronous: bool) -> None:
    variant = _Variant(4, 2, 40, asynchronous)
    variant.warm_up()
    before = replace(variant.engine.scheduler.stats)
    for _ in range(2):
        variant.whole_steps()
    variant.time_parts()
    variant.steps(40)
    after = variant.engine.scheduler.stats
    assert after.spans - before.spans == 4 * (after.steps - before.steps) == after.rows - before.rows
    assert all(task.kind == Kind.DECODE for task in variant.engine.scheduler.plan().tasks)
    assert {len(times) for times in variant._times.values()} >= {40}
    variant.engine.close()


def test_decode() -> None:
    work = ["--requests", "2", "--tokens", "6", "--prompt-len", "20", "--chunk", "4", "--thresholds", "1,0.01"]
    _, facts = run("decode", *SIZES, *work, "--depths", "3", "--max-batched-tokens", "32")
    none, ordinary, separate, fused = facts["loads"]
    assert facts["alone"]["predicted_ms"] > 0
    assert none["beside"] == "none"
    assert none["prompt_tokens_per_s"]["median"] == 0
    for row in (ordinary, separate, fused):
        assert row["prompt_tokens_per_s"]["median"] > 0
        assert row["output_tokens_per_s"]["median"] > 0
        assert 0 < row["itl_ms"]["p50"] <= row["itl_ms"]["p99"]
    exits = {(row["threshold"], row["exit_kv"]): row for row in facts["exits"]}
    assert exits[1.0, "exact"]["loops_per_token"] == exits[1.0, "copy"]["loops_per_token"] == 3
    assert exits[1.0, "exact"]["steps_per_token"] == pytest.approx(3)
    assert exits[0.01, "exact"]["loops_per_token"] == 1
    assert 1 < exits[0.01, "copy"]["loops_per_token"] < 1.5  # the first token is one of full depth


@pytest.mark.slow
def test_start() -> None:
    _, facts = run("start", "builtin", "--repeats", "1")
    empty, cached, bundle = facts["starts"]
    assert (bundle["compiler_runs"], cached["compiler_runs"]) == (0, 1)  # the cache's key needs the compiler's version
    assert empty["compiler_runs"] > 5
    assert empty["token"] == cached["token"] == bundle["token"]
    assert empty["first_token_ms"]["median"] > bundle["first_token_ms"]["median"]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["replay", "--rows", "17"], "rows: 17 rows are no whole number of chunks of 16"),
        (["replay", "--context", "8"], "context: 8 cannot end a chunk of 16"),
        (["replay", "--dtype", "auto"], "dtype: random weights have none of their own"),
        (["replay", "--backend", "fast"], "backend: 'fast' is unknown"),
        (["prefill", "--workload", "none"], "workload: 'none' is neither a file nor one of"),
        (["prefill", "--chunks", "16,some"], "'some' is not a number of rows or 'auto'"),
        (["decode", "--thresholds", "high"], "'high' is not a comma-separated list of numbers"),
        (["attention", "--contexts", "8"], "contexts: 8 cannot end a chunk of 16 rows"),
    ],
)
def test_what_cannot_be_measured_is_refused(arguments: list[str], named: str) -> None:
    result = CliRunner().invoke(main, ["bench", *arguments])
    assert result.exit_code == 2
    assert named in result.stderr


def test_runs_are_interleaved() -> None:
    calls: list[str] = []
    first, second = interleaved([lambda: calls.append("a"), lambda: calls.append("b")], 3)
    assert calls == ["a", "b"] * 5  # two rounds warm up
    assert first.low <= first.median <= first.high
    assert Times.of([3.0, 1.0, 2.0]) == Times(2.0, 1.0, 3.0)
    assert second.low > 0


def test_ladders_run_the_same_steps() -> None:
    options = ["--workload", "decode", "--steps", "5", "--context", "32", "--max-batched-tokens", "40", *SIZES]
    table, facts = run("ladder", *options, "--max-graphs", "3", "--depths", "2")
    ours, *others = facts["ladders"]
    assert ours["name"] == "optimised"
    assert ours["ratio"] == 1
    assert len(ours["sizes"]) <= 3
    assert {each["name"] for each in others} >= {"vLLM", "SGLang", "TensorRT-LLM", "powers of two"}
    for each in facts["ladders"]:
        assert each["sizes"][-1] == 40
        assert 0 < each["ms"]["low"] <= each["ms"]["median"]
        assert each["predicted_ms"] > 0
        assert 0 <= each["padding"] < 1
        assert each["name"] in table
    assert facts["steps"] == 5
    assert 1 <= facts["mean_rows"] <= 40


@pytest.mark.slow
def test_serve() -> None:
    work = ["--streams", "3", "--prompt-len", "9", "--tokens", "8", "--depths", "2"]
    table, facts = run("serve", *SIZES, *work)
    offline, http = facts["sides"]
    assert (offline["side"], http["side"]) == ("offline", "http")
    assert facts["ratio"] == pytest.approx(http["tokens_s"]["median"] / offline["tokens_s"]["median"])
    for side in (offline, http):
        assert side["tokens_s"]["median"] == pytest.approx(24e3 / side["run_ms"]["median"])
        assert side["steps"] >= 2 * 8
        assert 0 < side["replay_seconds"] * 1e3 < side["run_ms"]["high"]
    assert http["client_cpu_seconds"] > 0
    assert "3 streams" in table
