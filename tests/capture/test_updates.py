"""Table updates reach the device whole and in order, however many a step has, with rows or without."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.capture.driver import Driver, Step, make_executor, tiny_model
from tests.capture.verify import bits
from wavegraph.capture.metadata import DEFAULT_PARAMS, PARAM_UPDATES, StepLayout
from wavegraph.errors import CaptureError
from wavegraph.model.sampling import PARAMS_WIDTH, encode_params

LAYOUT = StepLayout(max_rows=4, max_coda_rows=2, max_spans=4, scratch_slot=12, scratch_page=20)


def updates(tokens: int, pages: int, params: int) -> Step:
    """So many updates of each kind, all of different entries."""
    return Step(
        token_slot=[at % 12 for at in range(tokens)],
        token_pos=[at // 12 for at in range(tokens)],
        token_id=[at % 63 + 1 for at in range(tokens)],
        page_slot=[at % 12 for at in range(pages)],
        page_index=[at // 12 for at in range(pages)],
        page_id=[at % 20 for at in range(pages)],
        param_slot=list(range(params)),
        param_row=[encode_params(seed=-1 - at, top_k=at) if at % 3 else () for at in range(params)],
    )


@given(st.integers(0, 30), st.integers(0, 30), st.integers(0, 20), st.integers(0, 2))
def test_parts_hold_every_update_once_and_rows_last(tokens: int, pages: int, params: int, spans: int) -> None:
    step = updates(tokens, pages, params)
    step.rows = spans
    step.span_slot, step.span_start = [0] * spans, list(range(spans))
    step.span_count, step.span_depth = [1] * spans, [0] * spans
    step.coda_slot, step.coda_pos, step.coda_depth, step.coda_action = [1], [2], [0], [1]
    parts = LAYOUT.parts(step)
    assert parts == max(1, -(-tokens // 4), -(-pages // 4), -(-params // PARAM_UPDATES))
    found: dict[str, list[int]] = {name: [] for name in LAYOUT.offsets}
    for part in range(parts):
        out = np.full(LAYOUT.size, -7, dtype=np.int32)
        LAYOUT.pack(step, out, part, parts)
        sections = {name: out[start:stop] for name, (start, stop) in LAYOUT.offsets.items()}
        header = sections["header"].tolist()
        last = part == parts - 1
        assert header[:3] == ([spans, spans, 1] if last else [0, 0, 0])
        assert header[6:] == [0, 0]
        assert sections["span_count"].sum() == header[1]
        counts = {"token": header[3], "page": header[4], "param": header[5], "coda": header[2], "span": header[0]}
        for name, values in sections.items():
            count = counts.get(name.split("_")[0], 0) * (PARAMS_WIDTH if name == "param_rows" else 1)
            found[name] += values[:count].tolist()
            start, stop = LAYOUT.offsets[name]
            assert name == "header" or (values[count:] == LAYOUT.template[start:stop][count:]).all(), name
    for name in found:
        if name == "param_rows":
            assert found[name] == [value for row in step.param_row for value in row or DEFAULT_PARAMS]
        elif name != "header":
            assert found[name] == getattr(step, name)


@pytest.fixture(scope="module", params=["eager", "recorded"])
def driver(request: pytest.FixtureRequest) -> Driver:
    executor = make_executor(tiny_model(), request.param, ladder=(1, 4), max_num_seqs=12, num_pages=20)
    return Driver(executor)


@settings(max_examples=25)
@given(st.integers(0, 40), st.integers(0, 40), st.integers(0, 12), st.sampled_from(["rows", "coda", "neither"]))
def test_tables_hold_what_was_sent(driver: Driver, tokens: int, pages: int, params: int, beside: str) -> None:
    executor, io = driver.executor, driver.executor.io
    tables = (io.token_table, io.page_table, io.params)
    for table, value in zip(tables, (0, 20, 5), strict=True):
        table.fill_(value)
    step = updates(tokens, pages, params)
    wanted = [table.clone() for table in tables]
    wanted[0][step.token_slot, step.token_pos] = torch.tensor(step.token_id, dtype=torch.int32)
    wanted[1][step.page_slot, step.page_index] = torch.tensor(step.page_id, dtype=torch.int32)
    rows = [row or DEFAULT_PARAMS for row in step.param_row]
    wanted[2][step.param_slot] = torch.tensor(rows, dtype=torch.int32).view(-1, PARAMS_WIDTH)
    if beside == "rows":
        step.rows, step.bucket = 1, 4
        step.span_slot, step.span_start, step.span_count, step.span_depth = [0], [2], [1], [1]
    elif beside == "coda":
        step.coda_slot, step.coda_pos, step.coda_depth, step.coda_action, step.coda_bucket = [1], [31], [2], [0], 1
    elif not tokens + pages + params:
        return
    replays = executor.stats.tables.rows
    output = executor.poll(executor.submit(step))
    if beside == "coda":
        wanted[0][1, 32] = output.tokens[0]
    for table, want in zip(tables, wanted, strict=True):
        assert torch.equal(table[:-1], want[:-1])
    parts = LAYOUT.parts(step)
    alone = beside != "rows" and tokens + pages + params > 0
    assert executor.stats.tables.rows - replays == parts - 1 + alone


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("token_id", 64, r"token_id\[0\]: 64 is outside 0\.\.63"),
        ("page_id", -1, r"page_id\[0\]: -1 is outside 0\.\.20"),
        ("param_slot", 13, r"param_slot\[1\]: 13 is outside 0\.\.12"),
    ],
)
def test_bad_update_in_any_part_is_refused_before_the_first_is_launched(
    driver: Driver, field: str, value: int, message: str
) -> None:
    io = driver.executor.io
    step = updates(9, 9, 10)
    getattr(step, field)[{"param_slot": 9}.get(field, 8)] = value
    tables = (io.token_table, io.page_table, io.params)
    before = [bits(table) for table in tables]
    with pytest.raises(CaptureError, match=message):
        driver.executor.submit(step)
    assert all(torch.equal(bits(table), old) for table, old in zip(tables, before, strict=True))


@pytest.mark.parametrize(
    "change", [lambda s: s.token_id.pop(), lambda s: s.page_index.pop(), lambda s: s.param_row.pop()]
)
def test_lists_that_are_not_parallel_are_refused_in_long_steps_too(change: Callable[[Step], object]) -> None:
    step = updates(30, 30, 12)
    change(step)
    with pytest.raises(CaptureError, match="make them parallel"):
        LAYOUT.pack(step, np.zeros(LAYOUT.size, dtype=np.int32), 0, LAYOUT.parts(step))
