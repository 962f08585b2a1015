"""What CODA does after the language head: who leaves, the greedy draw, KV of exits."""

import triton.language as tl

from wavegraph.model.ops.triton.kernels.jit import kernel


@kernel
def leave(
    left_tab, gate_ptr, page_tab, params_tab, coda_slot_tab, coda_pos_tab, coda_depth_tab, coda_action_tab, rows,
    page_width,
    PAGE_SIZE: tl.constexpr, DEPTHS: tl.constexpr, PARAMS: tl.constexpr, THRESHOLD: tl.constexpr,
    SAMPLE: tl.constexpr, GATE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """coda_left of BLOCK rows. Each sigmoid is computed in float64, then rounded to float32; no fused arithmetic."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    slot = tl.load(coda_slot_tab + row, mask=inside, other=0).to(tl.int64)
    pos = tl.load(coda_pos_tab + row, mask=inside, other=0)
    depth = tl.load(coda_depth_tab + row, mask=inside, other=0)
    action = tl.load(coda_action_tab + row, mask=inside, other=0)
    page = tl.load(page_tab + slot * page_width + pos // PAGE_SIZE, mask=inside, other=0).to(tl.int64)
    place = (page * PAGE_SIZE + pos % PAGE_SIZE) * DEPTHS
    asked = inside & (action == GATE)
    stayed = tl.full([BLOCK], 1.0, tl.float32)
    mass = tl.zeros([BLOCK], tl.float32)
    for index in tl.range(0, DEPTHS):
        logit = tl.load(gate_ptr + place + index, mask=asked & (index <= depth), other=float("-inf")).to(tl.float64)
        chance = (1.0 / (1.0 + tl.exp(-logit))).to(tl.float32)
        mass = mass + chance * stayed
        stayed = stayed * (1.0 - chance)
    threshold = tl.load(params_tab + slot * PARAMS + THRESHOLD, mask=inside, other=0).to(tl.float32, bitcast=True)
    goes = (mass >= threshold) | (depth == DEPTHS - 1)
    tl.store(left_tab + row, ((action == SAMPLE) | (asked & goes)).to(tl.int32), mask=inside)


@kernel
def draw_greedy(
    logits_ptr, token_out_tab, token_tab, left_tab, coda_slot_tab, coda_pos_tab, token_width,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The first of a row's largest logits, if it leaves; else -1, and nothing is stored. A NaN never wins."""
    row = tl.program_id(0).to(tl.int64)
    top = tl.full([], float("-inf"), tl.float32)
    token = tl.full([], 0, tl.int32)
    for start in tl.range(0, VOCAB, BLOCK):
        column = start + tl.arange(0, BLOCK)
        logit = tl.load(logits_ptr + row * VOCAB + column, mask=column < VOCAB, other=float("-inf")).to(tl.float32)
        logit = tl.where(logit == logit, logit, float("-inf"))
        best = tl.max(logit, 0)
        at = tl.min(tl.where(logit == best, column, VOCAB), 0)
        token = tl.where(best > top, at, token)
        top = tl.maximum(top, best)
    left = tl.load(left_tab + row) == 1
    tl.store(token_out_tab + row, tl.where(left, token, -1))
    to = tl.load(coda_slot_tab + row).to(tl.int64) * token_width + tl.load(coda_pos_tab + row) + 1
    tl.store(token_tab + to, token, mask=left)


@kernel
def copy_exits(
    k_ptr, v_ptr, page_tab, params_tab, left_tab, coda_slot_tab, coda_pos_tab, coda_depth_tab, coda_action_tab,
    page_width, scratch_slot,
    PAGE_SIZE: tl.constexpr, DEPTHS: tl.constexpr, LAYERS: tl.constexpr, KV_SIZE: tl.constexpr, PARAMS: tl.constexpr,
    EXIT_COPY: tl.constexpr, REPLAY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy K and V of a row's exit plane into its deeper ones, for one layer: program (row, layer)."""
    row = tl.program_id(0)
    layer = tl.program_id(1)
    slot = tl.load(coda_slot_tab + row).to(tl.int64)
    due = (tl.load(left_tab + row) == 1) | (tl.load(coda_action_tab + row) == REPLAY)
    allowed = tl.load(params_tab + slot * PARAMS + EXIT_COPY) == 1
    if due & allowed & (slot != scratch_slot):
        pos = tl.load(coda_pos_tab + row)
        depth = tl.load(coda_depth_tab + row)
        page = tl.load(page_tab + slot * page_width + pos // PAGE_SIZE).to(tl.int64)
        column = tl.arange(0, BLOCK)
        inside = column < KV_SIZE
        at = ((page * DEPTHS + depth) * LAYERS + layer) * PAGE_SIZE + pos % PAGE_SIZE
        k = tl.load(k_ptr + at * KV_SIZE + column, mask=inside, other=0.0)
        v = tl.load(v_ptr + at * KV_SIZE + column, mask=inside, other=0.0)
        for deeper in tl.range(depth + 1, DEPTHS):
            to = ((page * DEPTHS + deeper) * LAYERS + layer) * PAGE_SIZE + pos % PAGE_SIZE
            tl.store(k_ptr + to * KV_SIZE + column, k, mask=inside)
            tl.store(v_ptr + to * KV_SIZE + column, v, mask=inside)
