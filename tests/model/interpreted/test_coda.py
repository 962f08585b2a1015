"""Exits, greedy draws and copies of KV: equal to the ATen operators."""

import pytest
import torch

from tests.model.cpu_step import NAN, Shape, Step, normal, same_bits, seeded
from wavegraph.model.ops.aten import AtenOps
from wavegraph.model.ops.triton.ops import TritonOps
from wavegraph.model.sampling import Action, Column


def test_leave_equals_aten(ops: TritonOps) -> None:
    """Gate logits of all sizes, thresholds at the masses they give; gates of deeper depths are NaN."""
    shape = Shape(depths=6)
    step = Step(shape, torch.float32)
    step.pools.gate.copy_(torch.randn(step.pools.gate.shape, generator=seeded(1)) * 5)
    step.io.page_table[:, :14] = torch.arange(14)  # 14 pages of 5 positions for all requests
    step.io.coda_slot[:70] = torch.arange(70) % 3
    step.io.coda_pos[:70] = torch.arange(70)
    step.io.coda_depth[:70] = torch.arange(70) % 6
    step.io.coda_action[:70] = Action.GATE
    step.io.coda_action[3:70:9] = torch.arange(8) % 4
    for pos in range(70):
        step.pools.gate[pos // 5, pos % 5, pos % 6 + 1 :] = NAN
    left = []
    for threshold in (0.0, 0.1, 0.5, 0.9, 0.999, 1.0, 1.0000001):
        step.io.params[:, Column.EXIT_THRESHOLD] = torch.tensor(threshold).view(torch.int32)
        for implementation in (ops, AtenOps()):
            step.io.coda_left.fill_(-1)
            implementation.leave(step.io, step.pools, 70)
            left.append(step.io.coda_left.clone())
        assert torch.equal(left[-1], left[-2]), threshold
    counts = [int((each == 1).sum()) for each in left[::2]]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > counts[2] > counts[-1] > 0


def test_the_threshold_is_reached_not_passed(ops: TritonOps) -> None:
    """Gate logits of zero leave 1/2 and 1/4 of the mass."""
    step = Step(Shape(depths=3), torch.float32)
    step.pools.gate[step.place(0, 7)] = torch.tensor([0.0, 0.0, NAN])
    for row in (0, 1):
        for name, value in (("slot", 0), ("pos", 7), ("depth", row), ("action", Action.GATE)):
            getattr(step.io, f"coda_{name}")[row] = value
    for threshold, left in ((0.5, [1, 1]), (0.500001, [0, 1]), (0.75, [0, 1]), (0.750001, [0, 0])):
        step.io.params[0, Column.EXIT_THRESHOLD] = torch.tensor(threshold).view(torch.int32)
        ops.leave(step.io, step.pools, 2)
        assert step.io.coda_left[:2].tolist() == left


@pytest.mark.parametrize("vocab", [1, 70, 9000])
def test_the_first_of_the_largest_is_drawn(ops: TritonOps, dtype: torch.dtype, vocab: int) -> None:
    step = Step(Shape(vocab=vocab), dtype)
    levels = torch.randint(-3, 1, (6, vocab), generator=seeded(vocab))
    levels[3, :-1] = -4  # the last one, beyond every whole block
    step.io.logits[:6] = levels.to(dtype)
    expected = torch.tensor([row.index(max(row)) for row in levels.tolist()], dtype=torch.int32)
    step.io.logits[2] = NAN
    expected[2] = 0
    step.io.logits[4, : vocab // 2] = NAN  # a NaN never wins
    expected[4] = vocab // 2 + levels[4, vocab // 2 :].argmax() if vocab > 1 else 0
    step.io.coda_slot[0], step.io.coda_pos[0] = 1, 199
    step.io.coda_left[:5] = 1
    step.io.coda_slot[5], step.io.coda_pos[5] = 2, 50  # a row that stays
    expected[5] = -1
    ops.draw_greedy(step.io, 6)
    assert torch.equal(step.io.coda_token[:6], expected)
    assert (step.io.coda_token[6:] == -7).all()
    stored = torch.zeros_like(step.io.token_table[:-1])
    stored[1, 200] = expected[0]
    assert torch.equal(step.io.token_table[:-1], stored)


def test_exits_are_copied_and_nothing_else_is_touched(ops: TritonOps, dtype: torch.dtype) -> None:
    shape = Shape(depths=4, head_dim=24)
    step = Step(shape, dtype)
    for name in ("k", "v"):
        pool = getattr(step.pools, name)
        pool.copy_(normal(*pool.shape, key=(ord(name),), dtype=dtype))
    step.io.params[:2, Column.EXIT_COPY] = 1
    step.io.params[shape.slots] = 1  # of the scratch request, which owns nothing
    # (slot, pos, depth, action, left); the last is padding.
    rows = [
        (0, 3, 0, Action.SAMPLE, 1),
        (0, 4, 2, Action.GATE, 1),
        (0, 5, 1, Action.GATE, 0),
        (1, 199, 1, Action.REPLAY, 0),
        (1, 8, 3, Action.SAMPLE, 1),
        (2, 9, 0, Action.SAMPLE, 1),
        (shape.slots, 0, 0, Action.SCORE, 1),
    ]
    for index, row in enumerate(rows):
        for name, value in zip(("slot", "pos", "depth", "action", "left"), row, strict=True):
            getattr(step.io, f"coda_{name}")[index] = value
    expected = step.pools.k.clone(), step.pools.v.clone()
    for index in (0, 1, 3):
        slot, pos, depth = rows[index][:3]
        page, offset = step.place(slot, pos)
        for pool in expected:
            pool[page, depth + 1 :, :, offset] = pool[page, depth, :, offset]
    ops.copy_exits(step.io, step.pools, len(rows))
    assert same_bits(step.pools.k, expected[0])
    assert same_bits(step.pools.v, expected[1])
