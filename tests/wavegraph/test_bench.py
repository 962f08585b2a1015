"""The benchmarks run, say what they measured, and compare things that compute the same."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from wavegraph.bench.eager import EagerCore
from wavegraph.bench.measure import Times, interleaved
from wavegraph.bench.replay import _executor, _set_rows
from wavegraph.bench.shape import Shape
from wavegraph.cli import main
from wavegraph.model.weights import RopeTables
from wavegraph.runner import make_runner

SIZES = ["--hidden", "64", "--layers", "2", "--heads", "2", "--head-dim", "32", "--inner", "96", "--repeats", "1"]


@pytest.fixture(autouse=True)
def _small_machine_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wavegraph.bench.measure.READ_BYTES", 1 << 16)
    monkeypatch.setattr("wavegraph.bench.measure.MATRIX_SIZE", 32)


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


def test_prefill() -> None:
    _, facts = run("prefill", *SIZES, "--requests", "1,2", "--prompt-len", "24", "--chunk", "4", "--depths", "3")
    for row, count in zip(facts["requests"], (1, 2), strict=True):
        assert row["ordinary_rows"] == 4 * count
        assert row["wavefront_rows"] > row["ordinary_rows"]


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
