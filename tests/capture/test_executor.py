"""CORE and CODA through the executor, by hand-made steps."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.capture.driver import GOLDENS, Driver, Step, make_executor, tiny_model
from tests.capture.verify import assert_same_bits, bits
from wavegraph.buckets.ladder import Ladder
from wavegraph.capture.backends.eager import EagerBackend
from wavegraph.capture.buffers import Limits, page_bytes, pool_bytes
from wavegraph.capture.device import CpuDevice
from wavegraph.capture.executor import Executor
from wavegraph.capture.metadata import HEADER_FIELDS, StepLayout
from wavegraph.capture.ring import HostRing
from wavegraph.errors import CaptureError, ConfigError, EngineError
from wavegraph.model.loading import load_model
from wavegraph.model.ops.aten import AtenOps
from wavegraph.model.sampling import Column, encode_params

LADDER = (1, 2, 4, 8)
POOLS = ("k", "v", "hidden", "gate")
PROMPTS = {0: [3, 9, 27, 11, 60, 2, 5], 2: [8, 8, 1], 1: [50, 40, 30, 20, 10, 5, 4, 3, 2, 1]}


def driver_of(executor: Executor) -> Driver:
    driver = Driver(executor)
    for slot, prompt in PROMPTS.items():
        driver.add(slot, prompt)
    return driver


@pytest.mark.parametrize("backend", ["eager", "recorded", "compiled"])
@pytest.mark.parametrize("golden", ["tiny", "tiny_gqa", "tiny_hd32"])
@pytest.mark.parametrize(("chunk", "budget"), [(3, 8), (5, 16)])
def test_goldens(golden: str, backend: str, chunk: int, budget: int) -> None:
    model = load_model(GOLDENS / golden, ops=AtenOps(), max_model_len=64)
    expected = np.load(GOLDENS / f"{golden}_fp32.npz")
    executor = make_executor(model, backend, ladder=(1, 4, 8, 16), num_pages=40, max_model_len=64)
    driver = Driver(executor)
    driver.add(1, expected["gen_prompt"].tolist())
    count = len(expected["gen_tokens"])
    assert driver.generate(count, chunk, budget)[1] == expected["gen_tokens"].tolist()

    sequence = expected["token_ids"].tolist()[:60]
    driver.add(0, sequence)
    while spans := driver.ready(chunk, budget):
        driver.run(driver.make_step(spans))
    for (slot, pos, depth), gate in driver.gates.items():
        if slot == 0:
            assert gate == pytest.approx(expected["gate_logit"][depth, pos], abs=1e-4)
    driver.run(driver.make_step([], [(0, len(sequence) - 1)]))
    np.testing.assert_allclose(
        driver.logits[0, len(sequence) - 1].numpy(), expected["logits"][len(sequence) - 1], atol=1e-4
    )


@settings(max_examples=12)
@given(
    st.sampled_from(["recorded", "compiled"]),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.sampled_from([{}, {"num_key_value_heads": 4}, {"total_ut_steps": 1}, {"head_dim": 6, "num_hidden_layers": 1}]),
    st.integers(1, 8),
    st.integers(1, 8),
)
def test_replays_equal_eager(
    backend: str, dtype: torch.dtype, changes: dict[str, object], chunk: int, budget: int
) -> None:
    """Every output and the whole pools, bit for bit, after every step at its bucket."""
    model = tiny_model(backend, dtype, **changes)
    drivers = [driver_of(make_executor(model, each)) for each in ("eager", backend)]
    while spans := drivers[0].ready(chunk, budget):
        assert spans == drivers[1].ready(chunk, budget)
        coda = [(s, p + n - 1) for s, p, n, d in spans if d == drivers[0].depths - 1 and p + n == len(PROMPTS[s])]
        tokens = [driver.run(driver.make_step(spans, coda)) for driver in drivers]
        assert tokens[0] == tokens[1]
        for slot, _ in coda:
            for driver in drivers:
                driver.finish(slot)
        eager, recorded = (driver.executor for driver in drivers)
        assert_same_bits(recorded.io.logits, eager.io.logits, "logits")
        for pool in POOLS:
            assert_same_bits(getattr(recorded.pools, pool), getattr(eager.pools, pool), pool)
    assert drivers[1].executor.stats.core.hits.keys() <= set(LADDER)


@pytest.mark.parametrize("backend", ["recorded", "compiled"])
@pytest.mark.parametrize("bucket", LADDER)
def test_replays_equal_eager_at_every_bucket_and_fill(bucket: int, backend: str) -> None:
    model = tiny_model(backend)
    drivers = [driver_of(make_executor(model, each)) for each in ("eager", backend)]
    for rows in range(1, bucket + 1):
        for driver in drivers:
            driver.requests[1].frontier = [0] * driver.depths
            driver.run(driver.make_step([(1, 0, rows, 0)], bucket=bucket))
            driver.run(driver.make_step([(1, 0, rows, 1)], bucket=bucket))
        eager, recorded = (driver.executor for driver in drivers)
        for pool in POOLS:
            assert_same_bits(getattr(recorded.pools, pool), getattr(eager.pools, pool), f"{pool}, {rows} rows")


@pytest.mark.parametrize("backend", ["eager", "recorded", "compiled"])
def test_schedules_agree(backend: str) -> None:
    """The same tokens one row at a time and as a wavefront, alone and in company."""
    executor = make_executor(tiny_model(backend), backend)
    together = driver_of(executor).generate(6, chunk=3, budget=8)
    for slot, prompt in PROMPTS.items():
        driver = Driver(executor)
        driver.add(slot, prompt)
        assert driver.generate(6, chunk=1, budget=1) == {slot: together[slot]}


def test_progress_counts_every_bucket() -> None:
    model = tiny_model()
    limits = Limits(
        max_num_seqs=3, max_spans=4, max_rows=8, max_coda_rows=2, max_model_len=32, page_size=4, num_pages=4
    )
    executor = Executor(model, limits, Ladder(LADDER), Ladder([1, 2]), "recorded")
    seen: list[tuple[int, int]] = []
    executor.capture(lambda done, total: seen.append((done, total)))
    assert seen == [(done, 11) for done in range(1, 12)], "4 of core, 2 of each program over coda rows, 1 of tables"
    assert list(executor.core.facts) == [8, 4, 2, 1], "the largest first"
    assert all(facts.nodes > 0 and facts.bytes > 0 for facts in executor.core.facts.values())
    with pytest.raises(CaptureError, match="forbidden"):
        executor.capture()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_rows": 4}, "max_rows: 4 must be the largest core bucket, 8"),
        ({"max_coda_rows": 1}, "max_coda_rows: 1 must be the largest coda bucket, 2"),
        ({"max_model_len": 65}, "max_model_len: 65 exceeds the 64 positions of the model"),
        ({"num_pages": 0}, r"num_pages: must be in 1\.\."),
        ({"page_size": 2**31}, r"page_size: must be in 1\.\."),
    ],
)
def test_limits_that_do_not_agree(changes: dict[str, int], message: str) -> None:
    fields = {"max_num_seqs": 3, "max_spans": 4, "max_rows": 8, "max_coda_rows": 2, "max_model_len": 32}
    fields |= {"page_size": 4, "num_pages": 4} | changes
    with pytest.raises(ConfigError, match=message):
        Executor(tiny_model(), Limits(**fields), Ladder(LADDER), Ladder([1, 2]), "eager")


def test_a_model_elsewhere_is_refused() -> None:
    limits = make_executor(tiny_model(), "eager").limits
    elsewhere = CpuDevice()
    elsewhere.target = torch.device("meta")
    with pytest.raises(ConfigError, match="device: the backend runs on meta, but the model is on cpu; load it there"):
        Executor(tiny_model(), limits, Ladder(LADDER), Ladder([1, 2, 3]), EagerBackend(elsewhere))


SPAN_FIELDS = ("span_slot", "span_start", "span_count", "span_depth")
NO_SPANS: dict[str, object] = {"rows": 0} | {name: [] for name in SPAN_FIELDS}
A_PAGE: dict[str, object] = {"page_slot": [0], "page_index": [0], "page_id": [0]}
A_TOKEN: dict[str, object] = {"token_slot": [0], "token_pos": [0], "token_id": [0]}
A_CODA: dict[str, object] = {
    "coda_slot": [0], "coda_pos": [0], "coda_depth": [0], "coda_action": [0], "coda_bucket": 1
}  # fmt: skip


def some_params(column: int, value: int) -> dict[str, object]:
    row = list(encode_params())
    row[column] = value
    return {"param_slot": [0], "param_row": [row]}


BAD_STEPS: dict[str, tuple[dict[str, object], str]] = {
    "slot -1": ({"span_slot": [-1]}, r"span_slot\[0\]: -1 is outside 0\.\.3"),
    "slot too large": ({"span_slot": [4]}, r"span_slot\[0\]: 4 is outside"),
    "depth": ({"span_depth": [3]}, r"span_depth\[0\]: 3 is outside 0\.\.2"),
    "start": ({"span_start": [32]}, r"span_start\[0\]: 32 is outside 0\.\.31"),
    "end": ({"span_start": [31]}, "span 0: ends at position 33, beyond max_model_len 32"),
    "rows": ({"rows": 1}, "rows: 1, but the spans hold 2"),
    "empty span": (dict(zip(SPAN_FIELDS, ([0, 1], [0, 0], [2, 0], [0, 0]), strict=True)), r"span_count\[1\]: 0 rows"),
    "not parallel": ({"span_start": [0, 0]}, "span_start: 2 entries beside 1 of span_slot"),
    "too many spans": (dict.fromkeys(SPAN_FIELDS, [0] * 9), "span_slot: 9 entries exceed the 8"),
    "page -1": (A_PAGE | {"page_id": [-1]}, r"page_id\[0\]: -1 is outside 0\.\.24"),
    "page index": (A_PAGE | {"page_index": [8]}, r"page_index\[0\]: 8 is outside 0\.\.7"),
    "token id": (A_TOKEN | {"token_id": [64]}, r"token_id\[0\]: 64 is outside 0\.\.63"),
    "huge": (A_TOKEN | {"token_id": [2**40]}, "token_id: a value is not a 32-bit integer"),
    "float": ({"span_start": [0.5]}, "span_start: a value is not a 32-bit integer"),
    "bucket not recorded": ({"bucket": 3}, r"core: bucket 3 was not recorded; use one of \[1, 2, 4, 8\]"),
    "bucket too small": ({"bucket": 1}, "core: 2 rows do not fit bucket 1"),
    "coda position": (A_CODA | {"coda_pos": [32]}, r"coda_pos\[0\]: 32 is outside 0\.\.31"),
    "coda depth": (A_CODA | {"coda_depth": [3]}, r"coda_depth\[0\]: 3 is outside 0\.\.2"),
    "coda action": (A_CODA | {"coda_action": [4]}, r"coda_action\[0\]: 4 is outside 0\.\.3"),
    "coda bucket": (A_CODA | {"coda_bucket": 0}, "coda: bucket 0 was not recorded"),
    "full coda bucket": (A_CODA | {"coda_bucket": 9, "coda_features": 1}, "coda_full: bucket 9 was not recorded"),
    "params slot": ({"param_slot": [4], "param_row": [()]}, r"param_slot\[0\]: 4 is outside 0\.\.3"),
    "params width": ({"param_slot": [0], "param_row": [(1, 2)]}, r"param_row\[0\]: has 2 entries, not \d+"),
    "params value": (some_params(0, 2**31), r"param_row\[0\]: a value is not a 32-bit integer"),
    "stop id": (some_params(Column.STOP_IDS + 3, 64), r"param_rows\[0, column 19\]: 64 is outside 0\.\.63"),
    "bias id": (some_params(Column.BIAS_IDS, -1), r"param_rows\[0, column 32\]: -1 is outside 0\.\.63"),
    "bias count": (some_params(Column.BIAS_COUNT, 65), r"column 7\]: 65 is outside 0\.\.64"),
    "prompt length": (some_params(Column.PROMPT_LEN, 33), r"column 2\]: 33 is outside 0\.\.32"),
    "swap of the scratch page": ({"swap_out": [(1, [0, 24])]}, r"swap_out: page 24 of key 1 is outside 0\.\.23"),
    "swap of page -1": ({"swap_out": [(1, [-1])]}, r"swap_out: page -1 of key 1 is outside"),
    "swap in of nothing": ({"swap_in": [(7, [0])]}, "swap_in: key 7 is not on the host"),
    "empty": (NO_SPANS, "neither rows, coda rows, updates nor swaps"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_STEPS)
def test_bad_step_is_refused_before_launch(case: str) -> None:
    changes, message = BAD_STEPS[case]
    executor = make_executor(tiny_model(), "eager", max_in_flight=1)
    driver = driver_of(executor)
    driver.run(driver.make_step([(0, 0, 2, 0)]))
    state = [*vars_of(executor.io), *vars_of(executor.pools)]
    before = [bits(tensor) for tensor in state]
    good: dict[str, object] = {
        "rows": 2, "bucket": 2, "span_slot": [0], "span_start": [0], "span_count": [2], "span_depth": [1]
    }  # fmt: skip
    with pytest.raises(CaptureError, match=message):
        executor.submit(Step(**{**good, **changes}))  # type: ignore[arg-type]
    assert all(torch.equal(bits(tensor), old) for tensor, old in zip(state, before, strict=True))
    driver.run(driver.make_step([(0, 0, 2, 1)]))
    assert executor.stats.steps == 2


def vars_of(io: object) -> list[torch.Tensor]:
    return [getattr(io, name) for name in type(io).__slots__]  # type: ignore[attr-defined]


def test_life_of_tickets() -> None:
    executor = make_executor(tiny_model(), "recorded", max_in_flight=2)
    driver = driver_of(executor)
    steps = [driver.make_step([(0, 0, 2, 0)]), driver.make_step([(0, 0, 2, 1)], [(0, 1)])]
    tickets = [executor.submit(step) for step in steps]
    with pytest.raises(EngineError, match="steps in flight: 2 of 2"):
        executor.submit(steps[0])
    assert len(executor.poll(tickets[1]).tokens) == 1
    assert executor.poll(tickets[0]).tokens == []
    with pytest.raises(EngineError, match="step 0: was polled before"):
        executor.poll(tickets[0])
    last = executor.submit(steps[1])
    executor.close()
    assert len(executor.poll(last).tokens) == 1
    with pytest.raises(EngineError, match="closed"):
        executor.submit(steps[0])


def test_failure_after_launch_stops_the_executor(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = make_executor(tiny_model(), "eager")
    driver = driver_of(executor)
    step = driver.make_step([(0, 0, 2, 0)])

    def fail(*args: object) -> None:
        raise RuntimeError("device on fire")

    with monkeypatch.context() as patch:
        patch.setattr(AtenOps, "attention", fail)
        with pytest.raises(EngineError, match="step 0: failed after its launch: device on fire"):
            executor.submit(step)
    with pytest.raises(EngineError, match=r"step 0 failed after its launch \(device on fire\); build a new executor"):
        executor.submit(step)


def test_submit_before_capture_is_refused() -> None:
    limits = make_executor(tiny_model(), "eager").limits
    executor = Executor(tiny_model(), limits, Ladder(LADDER), Ladder([1, 2, 3]), "eager")
    with pytest.raises(EngineError, match=r"call capture\(\) first"):
        executor.submit(Step())


def test_pool_bytes_are_those_allocated() -> None:
    executor = make_executor(tiny_model(dtype=torch.bfloat16), "eager")
    pools, limits = executor.pools, executor.limits
    allocated = sum(pool.numel() * pool.element_size() for pool in vars_of(pools))
    config = tiny_model().config
    assert executor.pool_bytes == allocated == pool_bytes(config, limits, torch.bfloat16)
    assert page_bytes(config, limits.page_size, torch.bfloat16) * (limits.num_pages + 1) == allocated


def test_a_fresh_executor_holds_an_empty_step_and_scratch_tables() -> None:
    executor = make_executor(tiny_model(), "eager")
    io, limits = executor.io, executor.limits
    assert not io.header.any()
    assert (io.page_table == limits.scratch_page).all()
    assert io.page_table.shape == (limits.max_num_seqs + 1, limits.pages_per_request)
    assert io.token_table.shape == (limits.max_num_seqs + 1, limits.max_model_len + 1)
    assert io.span_slot.untyped_storage().data_ptr() == io.coda_pos.untyped_storage().data_ptr()


def test_layout_sections_neither_overlap_nor_leave_gaps() -> None:
    layout = StepLayout(max_rows=7, max_coda_rows=2, max_spans=3, scratch_slot=5, scratch_page=11)
    ranges = list(layout.offsets.values())
    assert [start for start, _ in ranges] == [0, *(stop for _, stop in ranges[:-1])]
    assert ranges[-1][1] == layout.size == layout.template.size
    assert len(HEADER_FIELDS) == 6
    spans = {"span_slot": [4], "span_start": [2], "span_count": [1], "span_depth": [3]}
    step = Step(rows=1, **spans, page_slot=[1], page_index=[2], page_id=[3])
    out = np.full(layout.size, -7, dtype=np.int32)
    layout.pack(step, out)
    changed = {int(at) for at in np.flatnonzero(out != layout.template)}
    starts = {name: start for name, (start, _) in layout.offsets.items()}
    wanted = {0, 1, 4, *(starts[f"span_{n}"] for n in ("slot", "start", "count", "depth"))}
    assert changed == wanted | {starts[f"page_{n}"] for n in ("slot", "index", "id")}


def test_ring_hands_out_the_slot_that_was_free_longest() -> None:
    layout = StepLayout(max_rows=2, max_coda_rows=2, max_spans=2, scratch_slot=1, scratch_page=1)
    ring = HostRing(2, layout, 64, CpuDevice())
    first, second = ring.take(), ring.take()
    assert ring.in_flight == 2
    ring.give(second)
    ring.give(first)
    assert ring.take() is second


def test_compiled_has_one_node_a_call_and_no_intermediates() -> None:
    """update_tables, prepare, gather, norm; eight calls a layer; scatter_gate."""
    facts = make_executor(tiny_model("compiled"), "compiled").core.facts
    assert {(fact.nodes, fact.bytes) for fact in facts.values()} == {(5 + 8 * 2, 0)}
