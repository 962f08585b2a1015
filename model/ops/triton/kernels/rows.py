"""What is done to each row by itself. One program a row, unless said."""

import triton
import triton.language as tl

from wavegraph.model.ops.triton.kernels.jit import kernel


@kernel
def gather(
    out_ptr, embedding_ptr, hidden_ptr, token_tab, row_slot_tab, row_pos_tab, row_depth_tab, row_page_tab,
    row_offset_tab, token_width, scratch_slot,
    HIDDEN: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The embedding of a row's token at depth 0, else its hidden row; zero for padding."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(row_slot_tab + row)
    live = slot != scratch_slot
    starts = live & (tl.load(row_depth_tab + row) == 0)
    column = tl.arange(0, BLOCK)
    inside = column < HIDDEN
    where = slot.to(tl.int64) * token_width + tl.load(row_pos_tab + row)
    token = tl.load(token_tab + where, mask=starts, other=0).to(tl.int64)
    place = tl.load(row_page_tab + row).to(tl.int64) * PAGE_SIZE + tl.load(row_offset_tab + row)
    embedded = tl.load(embedding_ptr + token * HIDDEN + column, mask=inside & starts, other=0.0)
    hidden = tl.load(hidden_ptr + place * HIDDEN + column, mask=inside & live & ~starts, other=0.0)
    tl.store(out_ptr + row * HIDDEN + column, tl.where(starts, embedded, hidden), mask=inside)


@triton.jit
def _rms(x, eps, HIDDEN: tl.constexpr):
    """x / rms(x) of one row in float32, zero beyond HIDDEN."""
    return x * tl.rsqrt(tl.sum(x * x, 0) / HIDDEN + eps)


@triton.jit
def _scaled(x, weight):
    """x times weight, each product rounded to the weight's dtype. Returns float32."""
    dtype = weight.dtype
    return (x.to(dtype).to(tl.float32) * weight.to(tl.float32)).to(dtype).to(tl.float32)


@kernel
def norm(
    out_ptr, x_ptr, weight_ptr, eps,
    HIDDEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out = rmsnorm(x) * weight."""
    row = tl.program_id(0).to(tl.int64) * HIDDEN
    column = tl.arange(0, BLOCK)
    inside = column < HIDDEN
    x = tl.load(x_ptr + row + column, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0)
    tl.store(out_ptr + row + column, _scaled(_rms(x, eps, HIDDEN), weight).to(weight.dtype), mask=inside)


@kernel
def residual_norm(
    x_ptr, out_ptr, branch_ptr, branch_weight_ptr, next_weight_ptr, eps,
    HIDDEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """x += rmsnorm(branch) * branch_weight; then out = rmsnorm(x) * next_weight."""
    row = tl.program_id(0).to(tl.int64) * HIDDEN
    column = tl.arange(0, BLOCK)
    inside = column < HIDDEN
    x = tl.load(x_ptr + row + column, mask=inside, other=0.0)
    branch = tl.load(branch_ptr + row + column, mask=inside, other=0.0).to(tl.float32)
    branch_weight = tl.load(branch_weight_ptr + column, mask=inside, other=0.0)
    next_weight = tl.load(next_weight_ptr + column, mask=inside, other=0.0)
    stream = (x.to(tl.float32) + _scaled(_rms(branch, eps, HIDDEN), branch_weight)).to(x.dtype)
    tl.store(x_ptr + row + column, stream, mask=inside)
    following = _scaled(_rms(stream.to(tl.float32), eps, HIDDEN), next_weight)
    tl.store(out_ptr + row + column, following.to(x.dtype), mask=inside)


@kernel
def rope_write(
    qkv_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr, row_pos_tab, row_depth_tab, row_page_tab, row_offset_tab, layer,
    scratch_page,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
    DEPTHS: tl.constexpr, LAYERS: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Rotate the q and k heads of a row in place, store its k and v heads. Padding is left alone.

    Program (row, i) takes BLOCK_H heads of q, k and v. BLOCK_D covers half a head: pairs are (j, j + HEAD_DIM / 2).
    Products and sums are each rounded to the model's dtype, as in the public reference.
    """
    HALF: tl.constexpr = HEAD_DIM // 2
    row = tl.program_id(0).to(tl.int64)
    page = tl.load(row_page_tab + row)
    if page != scratch_page:
        head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
        lane = tl.arange(0, BLOCK_D)
        inside = (head < HEADS + 2 * KV_HEADS)[:, None] & (lane < HALF)[None, :]
        at = row * ((HEADS + 2 * KV_HEADS) * HEAD_DIM) + head[:, None] * HEAD_DIM + lane[None, :]
        low = tl.load(qkv_ptr + at, mask=inside, other=0.0)
        high = tl.load(qkv_ptr + at + HALF, mask=inside, other=0.0)
        dtype = low.dtype
        angle = tl.load(row_pos_tab + row).to(tl.int64) * HEAD_DIM + lane
        cos = tl.load(cos_ptr + angle, mask=lane < HALF, other=0.0).to(tl.float32)[None, :]
        sin = tl.load(sin_ptr + angle, mask=lane < HALF, other=0.0).to(tl.float32)[None, :]
        wide_low = low.to(tl.float32)
        wide_high = high.to(tl.float32)
        low_cos = (wide_low * cos).to(dtype).to(tl.float32)
        high_sin = (wide_high * sin).to(dtype).to(tl.float32)
        high_cos = (wide_high * cos).to(dtype).to(tl.float32)
        low_sin = (wide_low * sin).to(dtype).to(tl.float32)
        turns = (head < HEADS + KV_HEADS)[:, None] & inside
        low = tl.where(turns, (low_cos - high_sin).to(dtype), low)
        high = tl.where(turns, (high_cos + low_sin).to(dtype), high)
        tl.store(qkv_ptr + at, low, mask=turns)
        tl.store(qkv_ptr + at + HALF, high, mask=turns)

        plane = (page.to(tl.int64) * DEPTHS + tl.load(row_depth_tab + row)) * LAYERS + layer
        token = (plane * PAGE_SIZE + tl.load(row_offset_tab + row)) * (KV_HEADS * HEAD_DIM)
        key = (head >= HEADS)[:, None] & turns
        to = token + (head[:, None] - HEADS) * HEAD_DIM + lane[None, :]
        tl.store(k_ptr + to, low, mask=key)
        tl.store(k_ptr + to + HALF, high, mask=key)
        value = (head >= HEADS + KV_HEADS)[:, None] & inside
        to = token + (head[:, None] - HEADS - KV_HEADS) * HEAD_DIM + lane[None, :]
        tl.store(v_ptr + to, low, mask=value)
        tl.store(v_ptr + to + HALF, high, mask=value)


@kernel
def silu_mul(
    out_ptr, gate_up_ptr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out [.., WIDTH] = silu(gate) * up for gate_up [.., 2 WIDTH]; program (row, i) takes BLOCK columns."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    gate = tl.load(gate_up_ptr + row * (2 * WIDTH) + column, mask=inside, other=0.0)
    up = tl.load(gate_up_ptr + row * (2 * WIDTH) + WIDTH + column, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    silu = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)
    tl.store(out_ptr + row * WIDTH + column, (silu.to(tl.float32) * up.to(tl.float32)).to(gate.dtype), mask=inside)


@kernel
def scatter_gate(
    h_ptr, hidden_ptr, gate_ptr, weight_ptr, bias_ptr, row_depth_tab, row_page_tab, row_offset_tab, scratch_page,
    HIDDEN: tl.constexpr, PAGE_SIZE: tl.constexpr, DEPTHS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store a row in the hidden pool, and its gate logit, a float32 dot, at its depth. Padding is left alone."""
    row = tl.program_id(0).to(tl.int64)
    page = tl.load(row_page_tab + row)
    if page != scratch_page:
        column = tl.arange(0, BLOCK)
        inside = column < HIDDEN
        place = page.to(tl.int64) * PAGE_SIZE + tl.load(row_offset_tab + row)
        h = tl.load(h_ptr + row * HIDDEN + column, mask=inside, other=0.0)
        tl.store(hidden_ptr + place * HIDDEN + column, h, mask=inside)
        weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
        logit = tl.sum(h.to(tl.float32) * weight, 0) + tl.load(bias_ptr).to(tl.float32)
        depth = tl.load(row_depth_tab + row)
        tl.store(gate_ptr + place * DEPTHS + depth, logit.to(h.dtype).to(tl.float32))


@kernel
def coda_gather(
    out_ptr, hidden_ptr, page_tab, coda_slot_tab, coda_pos_tab, page_width, scratch_slot,
    HIDDEN: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out = the hidden row of a coda position; zero for padding."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(coda_slot_tab + row)
    live = slot != scratch_slot
    pos = tl.load(coda_pos_tab + row)
    page = tl.load(page_tab + slot.to(tl.int64) * page_width + pos // PAGE_SIZE).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < HIDDEN
    at = (page * PAGE_SIZE + pos % PAGE_SIZE) * HIDDEN + column
    tl.store(out_ptr + row * HIDDEN + column, tl.load(hidden_ptr + at, mask=inside & live, other=0.0), mask=inside)
