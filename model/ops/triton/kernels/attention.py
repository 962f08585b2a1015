"""Paged attention over a work list, and the merge of its splits."""

import triton.language as tl

from wavegraph.model.ops.triton.kernels.jit import kernel


@kernel
def attention(
    out_ptr, partial_ptr, lse_ptr, qkv_ptr, k_ptr, v_ptr, tiles_tab, items_tab, live_tab, page_tab, layer, page_width,
    split, splits, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
    DEPTHS: tl.constexpr, LAYERS: tl.constexpr, TILE_ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Attention of a tile's rows, one head, over positions ``[i * split, (i + 1) * split)`` of their plane, per item.

    The programs take (item, head) in turn, as many as ``live_tab [1]`` says there are. Splits and blocks of keys start
    at fixed positions and a block that a row does not see leaves it bit for bit as it was, so a row's result depends on
    its own position alone. A row whose prefix is one split goes to ``out [R, HEADS HEAD_DIM]``; the others leave a
    normalised ``partial [R, splits, HEADS, HEAD_DIM]`` and the log2 of their sum ``lse [R, splits, HEADS]``, float32.
    ``scale`` is in powers of two.
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    query = tl.arange(0, TILE_ROWS)
    lane = tl.arange(0, BLOCK_D)
    within = lane < HEAD_DIM
    for work in tl.range(tl.program_id(0), tl.load(live_tab) * HEADS, tl.num_programs(0)):
        head = work % HEADS
        item = items_tab + work // HEADS * 2
        tile = tiles_tab + tl.load(item) * 5
        part = tl.load(item + 1)
        length = tl.load(tile + 1)
        row = tl.load(tile).to(tl.int64) + query
        pages = page_tab + tl.load(tile + 2).to(tl.int64) * page_width
        depth = tl.load(tile + 3)
        first = tl.load(tile + 4)
        pos = first + query
        live = query < length
        inside = live[:, None] & within[None, :]
        at = row[:, None] * ((HEADS + 2 * KV_HEADS) * HEAD_DIM) + head * HEAD_DIM + lane[None, :]
        q = tl.load(qkv_ptr + at, mask=inside, other=0.0)

        begin = part * split
        end = tl.minimum(begin + split, first + length)
        top = tl.full([TILE_ROWS], float("-inf"), tl.float32)
        total = tl.zeros([TILE_ROWS], tl.float32)
        acc = tl.zeros([TILE_ROWS, BLOCK_D], tl.float32)
        for block in tl.range(begin, end, BLOCK_N):
            key = block + tl.arange(0, BLOCK_N)
            known = key < end
            page = tl.load(pages + key // PAGE_SIZE, mask=known, other=0).to(tl.int64)
            token = ((page * DEPTHS + depth) * LAYERS + layer) * PAGE_SIZE + key % PAGE_SIZE
            vector = (token * KV_HEADS + head // GROUP) * HEAD_DIM
            k = tl.load(k_ptr + vector[None, :] + lane[:, None], mask=known[None, :] & within[:, None], other=0.0)
            score = tl.dot(q, k, input_precision=PRECISION) * scale
            score = tl.where(known[None, :] & (key[None, :] <= pos[:, None]), score, float("-inf"))
            higher = tl.maximum(top, tl.max(score, 1))
            base = tl.where(higher == float("-inf"), 0.0, higher)  # nothing seen yet: no difference of infinities
            chance = tl.exp2(score - base[:, None])
            shrink = tl.exp2(top - base)
            total = total * shrink + tl.sum(chance, 1)
            v = tl.load(v_ptr + vector[:, None] + lane[None, :], mask=known[:, None] & within[None, :], other=0.0)
            acc = acc * shrink[:, None] + tl.dot(chance.to(v.dtype), v, input_precision=PRECISION)
            top = higher

        saw = live & (pos >= begin)
        result = acc / tl.where(saw, total, 1.0)[:, None]
        whole = saw & (pos < split)
        to = row[:, None] * (HEADS * HEAD_DIM) + head * HEAD_DIM + lane[None, :]
        tl.store(out_ptr + to, result.to(q.dtype), mask=whole[:, None] & within[None, :])
        parted = saw & (pos >= split)
        to = (row * splits + part) * HEADS + head
        tl.store(lse_ptr + to, top + tl.log2(tl.where(saw, total, 1.0)), mask=parted)
        tl.store(partial_ptr + to[:, None] * HEAD_DIM + lane[None, :], result, mask=parted[:, None] & within[None, :])


@kernel
def merge_splits(
    out_ptr, partial_ptr, lse_ptr, row_pos_tab, row_page_tab, split, splits, scratch_page,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Join the splits of a row that has several, in their order. Program (row, i) takes BLOCK_H heads."""
    row = tl.program_id(0).to(tl.int64)
    pos = tl.load(row_pos_tab + row)
    if (tl.load(row_page_tab + row) != scratch_page) & (pos >= split):
        head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
        lane = tl.arange(0, BLOCK_D)
        inside = (head < HEADS)[:, None] & (lane < HEAD_DIM)[None, :]
        parts = pos // split + 1
        place = row * splits * HEADS + head
        top = tl.full([BLOCK_H], float("-inf"), tl.float32)
        for part in tl.range(0, parts):
            top = tl.maximum(top, tl.load(lse_ptr + place + part * HEADS, mask=head < HEADS, other=0.0))
        total = tl.zeros([BLOCK_H], tl.float32)
        acc = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
        for part in tl.range(0, parts):
            share = tl.exp2(tl.load(lse_ptr + place + part * HEADS, mask=head < HEADS, other=0.0) - top)
            at = (place + part * HEADS)[:, None] * HEAD_DIM + lane[None, :]
            total += share
            acc += share[:, None] * tl.load(partial_ptr + at, mask=inside, other=0.0)
        to = (row * HEADS + head)[:, None] * HEAD_DIM + lane[None, :]
        tl.store(out_ptr + to, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=inside)
