"""Faults of padding and static buffers that public engines had, one test each."""

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.capture.driver import Driver, Step, make_executor, tiny_model
from tests.capture.verify import assert_same_bits, bits
from wavegraph.capture.executor import Executor
from wavegraph.capture.metadata import FEATURE_COPY_KV
from wavegraph.errors import CaptureError, EngineError
from wavegraph.model.sampling import FEATURE_SAMPLER, PARAMS_WIDTH, Action, encode_params

BACKENDS = ["eager", "recorded", "compiled"]
PROMPT = [3, 9, 27, 11, 60, 2, 5]


def pools_of(executor: Executor) -> dict[str, Tensor]:
    pools = executor.pools
    return {"k": pools.k, "v": pools.v, "hidden": pools.hidden, "gate": pools.gate}


def tables_of(executor: Executor) -> tuple[Tensor, ...]:
    return executor.io.token_table, executor.io.page_table, executor.io.params


def live_values(driver: Driver) -> dict[str, Tensor]:
    """Every KV, hidden row and gate that some request owns and has computed."""
    kv, hidden = driver.written()
    pools = driver.executor.pools
    values = {name: getattr(pools, name).permute(0, 1, 3, 2, 4, 5)[kv] for name in ("k", "v")}
    return values | {"hidden": pools.hidden[hidden], "gate": pools.gate.transpose(1, 2)[kv]}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "field",
    [
        "span_slot", "page_slot", "page_index", "page_id", "token_slot", "param_slot",
        "coda_slot", "coda_depth", "coda_action",
    ],
)  # fmt: skip
def test_sentinel_used_as_an_index_writes_the_last_entry_of_somebody_else(backend: str, field: str) -> None:
    executor = make_executor(tiny_model(backend), backend)
    driver = Driver(executor)
    driver.add(0, PROMPT)
    step = driver.make_step([(0, 0, 2, 0)], [(0, 1)])
    setattr(step, field, [-1] * len(getattr(step, field)))
    before = {name: bits(pool) for name, pool in pools_of(executor).items()}
    with pytest.raises(CaptureError, match=rf"{field}\[0\]: -1 is outside"):
        executor.submit(step)
    assert all(torch.equal(bits(pool), before[name]) for name, pool in pools_of(executor).items())


@pytest.mark.parametrize("features", [0, FEATURE_SAMPLER, FEATURE_COPY_KV, FEATURE_SAMPLER | FEATURE_COPY_KV])
@pytest.mark.parametrize("backend", BACKENDS)
def test_padding_writes_a_real_page_or_advances_a_real_request(backend: str, features: int) -> None:
    """With every page owned, a row in a bucket of eight and a coda row in one of three change their own places alone.

    The coda row leaves early, but its request did not ask for its KV to be copied.
    """
    executor = make_executor(tiny_model(backend), backend, num_pages=4)
    driver = Driver(executor, free_pages=[0, 3, 1, 2])
    for slot, length in ((0, 4), (1, 8), (2, 4)):
        driver.add(slot, PROMPT[:1] * length)
        driver.run(driver.make_step([(slot, 0, length, 0)]))
    assert not driver.free
    for pool in pools_of(executor).values():
        pool.fill_(7)
    tables = [table.clone() for table in tables_of(executor)]
    page, offset = driver.requests[1].pages[1], 2
    step = driver.make_step([(1, 6, 1, 1)], [(1, 7, 0, Action.SAMPLE)], bucket=8)
    step.coda_bucket, step.coda_features = 3, features
    driver.run(step)
    for name, pool in pools_of(executor).items():
        untouched = pool[:-1].clone()
        places = {"hidden": untouched[page, offset], "gate": untouched[page, offset, 1]}
        place = places[name] if name in places else untouched[page, 1, :, offset]
        assert (place != 7).all(), "the live row was written"
        place.fill_(7)
        assert (untouched == 7).all(), f"{name}: padding touched a page that a request owns"
    tables[0][1, 8] = executor.io.coda_token[0]
    for table, now in zip(tables, tables_of(executor), strict=True):
        assert torch.equal(table[:-1], now[:-1])


@pytest.mark.parametrize("backend", BACKENDS)
def test_tail_of_a_buffer_keeps_the_previous_larger_batch(backend: str) -> None:
    model = tiny_model(backend)
    used, fresh = (Driver(make_executor(model, backend)) for _ in range(2))
    used.add(0, PROMPT)
    used.add(1, PROMPT[::-1])
    used.run(used.make_step([(0, 0, 4, 0), (1, 0, 4, 0)], [(0, 3), (1, 3)]))
    used.finish(0)
    used.finish(1)
    for driver in (used, fresh):
        driver.free = [20, 21]
        driver.add(2, PROMPT)
        driver.run(driver.make_step([(2, 0, 3, 0)], [(2, 2)], bucket=8))
    inputs = used.executor.limits.layout().offsets
    for name in (*inputs, "row_slot", "row_pos", "row_depth", "row_page", "row_offset"):
        assert_same_bits(getattr(used.executor.io, name), getattr(fresh.executor.io, name), name)
    for name, value in live_values(fresh).items():
        assert_same_bits(live_values(used)[name], value, name)
    assert_same_bits(used.logits[2, 2], fresh.logits[2, 2], "logits")


@pytest.mark.parametrize("bucket", [1, 2, 4, 8])
@pytest.mark.parametrize("backend", BACKENDS)
def test_lengths_computed_before_padding_and_used_after_it(backend: str, bucket: int) -> None:
    """Row fields follow the plan at every fill of every bucket, and every row beyond it is scratch."""
    executor = make_executor(tiny_model(backend), backend)
    driver = Driver(executor, free_pages=[5, 6, 7, 8])
    driver.add(0, PROMPT)
    driver.add(1, PROMPT)
    io, limits = executor.io, executor.limits
    for rows in range(1, bucket + 1):
        spans = [(0, 3, rows - rows // 2, 0), *([(1, 1, rows // 2, 2)] if rows > 1 else [])]
        driver.make_step([(1, 0, 5, 0)])  # pages for slot 1, whose span starts deep
        step = driver.make_step(spans, bucket=bucket)
        step.page_slot, step.page_index, step.page_id = [], [], []
        for slot, request in driver.requests.items():
            step.page_slot += [slot] * len(request.pages[:1])
            step.page_index += range(len(request.pages[:1]))
            step.page_id += request.pages[:1]
        executor.poll(executor.submit(step))
        wanted = [(s, start + at, d) for s, start, count, d in spans for at in range(count)]
        wanted += [(limits.scratch_slot, 0, 0)] * (bucket - rows)
        fields = zip(io.row_slot.tolist(), io.row_pos.tolist(), io.row_depth.tolist(), strict=True)
        assert list(fields)[:bucket] == wanted
        assert io.row_page[rows:bucket].tolist() == [limits.scratch_page] * (bucket - rows)
        assert not io.row_offset[rows:bucket].any()


SAMPLED = encode_params(
    prompt_len=7, seed=5, temperature=0.8, top_k=20, repetition_penalty=1.2, exit_threshold=0.5, exit_copy=True
)


@pytest.mark.parametrize("features", [0, FEATURE_SAMPLER])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_uninitialised_padding_reaches_a_value_that_live_rows_share(
    backend: str, dtype: torch.dtype, features: int
) -> None:
    """NaN in scratch, free pages, tails of live pages and every intermediate, before each step: no bit changes."""
    model = tiny_model(backend, dtype)
    clean, poisoned = (Driver(make_executor(model, backend)) for _ in range(2))
    poisoned.before_submit = lambda step: poisoned.poison()
    results = []
    for driver in (clean, poisoned):
        driver.features = features
        for slot, prompt in {0: PROMPT, 1: [1, 2], 2: PROMPT[::-1] * 2}.items():
            driver.add(slot, prompt, SAMPLED if slot == 0 else ())
        results.append(driver.generate(5, chunk=3, budget=8))
    assert results[0] == results[1]
    assert clean.gates.keys() == poisoned.gates.keys()
    for key, gate in clean.gates.items():
        assert not gate.isnan()
        assert_same_bits(poisoned.gates[key], gate, f"gate of {key}")
    for key, logits in clean.logits.items():
        assert_same_bits(poisoned.logits[key], logits, f"logits of {key}")


def test_entries_beyond_the_work_list_are_read() -> None:
    """Whatever a larger capture could read beyond the plan says: no rows, scratch slot, scratch page."""
    executor = make_executor(tiny_model(), "eager")
    limits, layout = executor.limits, executor.limits.layout()
    out = np.full(layout.size, -1, dtype=np.int32)
    layout.pack(Step(rows=2, bucket=8, span_slot=[0], span_start=[0], span_count=[2], span_depth=[1]), out)
    sections = {name: out[start:stop] for name, (start, stop) in layout.offsets.items()}
    assert not sections["span_count"][1:].any()
    for name in ("span_slot", "token_slot", "page_slot", "param_slot", "coda_slot"):
        assert (sections[name][1:] == limits.scratch_slot).all()
    assert (sections["coda_action"] == Action.SCORE).all(), "draws nothing"
    assert (sections["param_rows"].reshape(-1, PARAMS_WIDTH) == encode_params()).all()
    assert (sections["page_id"] == limits.scratch_page).all()
    assert not sections["header"][6:].any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_host_buffer_is_refilled_while_its_copy_is_in_flight(backend: str) -> None:
    """Until it is polled, each step keeps its own host memory; one more step than there is memory is refused."""
    executor = make_executor(tiny_model(backend), backend, max_in_flight=3)
    driver = Driver(executor)
    driver.add(0, PROMPT)
    for depth in range(driver.depths):
        driver.run(driver.make_step([(0, 0, 7, depth)]))
    steps = [driver.make_step([], [(0, pos)]) for pos in (1, 4, 6)]
    alone = [executor.poll(executor.submit(step)).tokens for step in steps]
    assert len({token for tokens in alone for token in tokens}) > 1, "else the test shows nothing"
    tickets = [executor.submit(step) for step in steps]
    memory = {ticket.slot.staging(0).tensor.data_ptr() for ticket in tickets if ticket.slot is not None}
    assert len(memory) == 3
    with pytest.raises(EngineError, match="steps in flight: 3 of 3"):
        executor.submit(steps[0])
    assert [executor.poll(ticket).tokens for ticket in reversed(tickets)] == alone[::-1]
