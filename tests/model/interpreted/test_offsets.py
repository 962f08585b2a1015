"""Pools of more than 2^31 elements: every kernel that reads or writes them finds the last pages.

The pools are memory that was never touched, so they cost what the rows in them take.
"""

import torch

from tests.model.cpu_step import Shape, Step, normal
from tests.model.interpreted.steps import assert_close, prepare
from wavegraph.model.io import Pools
from wavegraph.model.ops.triton.ops import TritonOps
from wavegraph.model.sampling import Action, Column

PAGES = 66000
DTYPE = torch.bfloat16
SHAPE = Shape(heads=2, kv_heads=2, head_dim=128, hidden=2048, slots=2, length=32, page_size=16, depths=4, rows=4)


def make_step(ops: TritonOps) -> Step:
    step = Step(SHAPE, DTYPE)
    plane = (SHAPE.depths, SHAPE.layers, SHAPE.page_size, SHAPE.kv_heads, SHAPE.head_dim)
    step.pools = Pools(
        k=torch.empty((PAGES + 1, *plane), dtype=DTYPE),
        v=torch.empty((PAGES + 1, *plane), dtype=DTYPE),
        hidden=torch.empty((PAGES + 1, SHAPE.page_size, SHAPE.hidden), dtype=DTYPE),
        gate=torch.empty((PAGES + 1, SHAPE.page_size, SHAPE.depths)),
    )
    assert min(pool[:PAGES].numel() for pool in (step.pools.k, step.pools.v, step.pools.hidden)) > 2**31
    step.io.page_table[:2] = torch.tensor([[PAGES - 1, PAGES - 2], [PAGES - 3, PAGES - 4]])
    return step


def test_the_last_pages_are_found(ops: TritonOps) -> None:
    step = make_step(ops)
    io, pools = step.io, step.pools
    spans = [(0, 14, 3, 2)]  # over the edge of a page
    prepare(ops, step, spans, bucket=4)
    io = step.io
    assert io.row_page[:4].tolist() == [PAGES - 1, PAGES - 1, PAGES - 2, PAGES]
    keys, values = (normal(14, 2, 128, key=(key,), dtype=DTYPE) for key in (1, 2))
    pools.k[PAGES - 1, 2, 1, :14], pools.v[PAGES - 1, 2, 1, :14] = keys, values

    qkv = normal(4, 6 * 128, key=(3,), dtype=DTYPE)
    cos, sin = torch.ones(32, 128, dtype=DTYPE), torch.zeros(32, 128, dtype=DTYPE)
    ops.rope_write(qkv, io, pools, cos, sin, 1, 4)
    new = qkv[:3].view(3, 6, 128)
    places = [(PAGES - 1, 14), (PAGES - 1, 15), (PAGES - 2, 0)]
    for row, (page, offset) in enumerate(places):
        assert torch.equal(pools.k[page, 2, 1, offset], new[row, 2:4])
        assert torch.equal(pools.v[page, 2, 1, offset], new[row, 4:])

    out = torch.empty(4, 256, dtype=DTYPE)
    ops.attention(out, qkv, io, pools, 1, 4)
    k, v = torch.cat((keys, new[:, 2:4])).double(), torch.cat((values, new[:, 4:])).double()
    for row in range(3):
        seen = 15 + row
        chance = torch.einsum("hd,chd->hc", new[row, :2].double(), k[:seen]).mul(128**-0.5).softmax(dim=1)
        exact = torch.einsum("hc,chd->hd", chance, v[:seen]).flatten()
        assert_close(out[row], exact, absolute=2**-8)

    h = normal(4, SHAPE.hidden, key=(4,), dtype=DTYPE)
    ops.scatter_gate(h, io, pools, h[0], h[0, :1], 4)
    exact_gates = h[:3].double() @ h[0].double() + h[0, 0].double()
    for row, place in enumerate(places):
        assert torch.equal(pools.hidden[place], h[row])
        assert_close(pools.gate[(*place, 2)].bfloat16(), exact_gates[row])
    got = torch.empty(4, SHAPE.hidden, dtype=DTYPE)
    ops.gather(got, io, pools, h, 4)
    assert torch.equal(got[:3], h[:3])

    io.coda_slot[:2], io.coda_pos[:2], io.coda_depth[:2] = 0, torch.tensor([15, 16]), 2
    io.coda_action[:2], io.coda_left[:2] = Action.SAMPLE, 1
    io.params[:, Column.EXIT_COPY] = 1
    ops.coda_gather(got, io, pools, 2)
    assert torch.equal(got[:2], h[1:3])
    ops.copy_exits(io, pools, 2)
    for row in (1, 2):
        page, offset = places[row]
        assert torch.equal(pools.k[page, 3, 1, offset], new[row, 2:4])
        assert torch.equal(pools.v[page, 3, 1, offset], new[row, 4:])


def test_gates_of_the_last_pages_decide(ops: TritonOps) -> None:
    step = make_step(ops)
    io, pools = step.io, step.pools
    pools.gate[PAGES - 4, 3, :2] = torch.tensor([-9.0, 9.0])
    io.coda_slot[0], io.coda_pos[0], io.coda_action[0] = 1, 19, Action.GATE
    io.params[:, Column.EXIT_THRESHOLD] = torch.tensor(0.5).view(torch.int32)
    for depth, left in ((0, 0), (1, 1)):
        io.coda_depth[0] = depth
        ops.leave(io, pools, 1)
        assert io.coda_left[0] == left
