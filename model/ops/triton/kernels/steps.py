"""What precedes a step's layers: table updates, rows, tiles of rows, and attention's work list."""

import triton
import triton.language as tl

from wavegraph.model.ops.triton.kernels.jit import kernel


@kernel
def update_tables(
    token_slot_tab, token_pos_tab, token_id_tab, page_slot_tab, page_index_tab, page_id_tab, param_slot_tab,
    param_rows_tab, token_tab, page_tab, params_tab, entries, param_entries, token_width, page_width, scratch_slot,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, WIDTH_BLOCK: tl.constexpr,
):  # fmt: skip
    """Store token, page and parameter updates; entries of the scratch slot are not in use.

    Program i takes entries ``i * BLOCK ...`` of the first two, and parameter row i.
    """
    program = tl.program_id(0)
    entry = program * BLOCK + tl.arange(0, BLOCK)
    inside = entry < entries
    slot = tl.load(token_slot_tab + entry, mask=inside, other=scratch_slot)
    used = inside & (slot != scratch_slot)
    where = slot.to(tl.int64) * token_width + tl.load(token_pos_tab + entry, mask=used, other=0)
    tl.store(token_tab + where, tl.load(token_id_tab + entry, mask=used, other=0), mask=used)

    slot = tl.load(page_slot_tab + entry, mask=inside, other=scratch_slot)
    used = inside & (slot != scratch_slot)
    where = slot.to(tl.int64) * page_width + tl.load(page_index_tab + entry, mask=used, other=0)
    tl.store(page_tab + where, tl.load(page_id_tab + entry, mask=used, other=0), mask=used)

    if program < param_entries:
        owner = tl.load(param_slot_tab + program)
        column = tl.arange(0, WIDTH_BLOCK)
        kept = (column < WIDTH) & (owner != scratch_slot)
        row = tl.load(param_rows_tab + program * WIDTH + column, mask=kept, other=0)
        tl.store(params_tab + owner.to(tl.int64) * WIDTH + column, row, mask=kept)


@triton.jit
def _find(ends_tab, count, number, steps):
    """Which of ``count`` intervals that end at ``ends`` holds each number: by bisection, ``2 ** steps > count``."""
    low = tl.zeros_like(number)
    high = low + count
    for _ in tl.range(0, steps):
        middle = (low + high) // 2
        open_ = low < high
        beyond = tl.load(ends_tab + middle, mask=open_, other=0) <= number
        high = tl.where(open_ & ~beyond, middle, high)
        low = tl.where(open_ & beyond, middle + 1, low)
    return low


@triton.jit
def _start(ends_tab, which, live):
    """Where an interval starts: where the one before it ends."""
    return tl.load(ends_tab + which - 1, mask=live & (which > 0), other=0)


@kernel
def plan_tiles(
    span_slot_tab, span_start_tab, span_count_tab, span_depth_tab, row_ends_tab, tile_ends_tab, tiles_tab,
    item_ends_tab, live_tab, spans, steps, split,
    TILE_ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Tiles of at most TILE_ROWS rows of one span, and where rows and tiles of spans, and items of tiles, end.

    A tile is ``(first row, rows, slot, depth, position of the first row)``; it has an item for each split of its
    prefix. ``live [2]`` are the numbers of items and of tiles. One program: sums run on from block to block.
    """
    rows = tl.full([], 0, tl.int32)
    tiles = tl.full([], 0, tl.int32)
    for first in tl.range(0, spans, BLOCK):
        span = first + tl.arange(0, BLOCK)
        inside = span < spans
        count = tl.load(span_count_tab + span, mask=inside, other=0)
        row_ends = rows + tl.cumsum(count, 0)
        tile_ends = tiles + tl.cumsum((count + TILE_ROWS - 1) // TILE_ROWS, 0)
        tl.store(row_ends_tab + span, row_ends, mask=inside)
        tl.store(tile_ends_tab + span, tile_ends, mask=inside)
        rows = tl.max(row_ends, 0)
        tiles = tl.max(tile_ends, 0)
    tl.debug_barrier()  # other threads read what was stored
    items = tl.full([], 0, tl.int32)
    for first in tl.range(0, tiles, BLOCK):
        tile = first + tl.arange(0, BLOCK)
        live = tile < tiles
        span = _find(tile_ends_tab, spans, tile, steps)
        skipped = (tile - _start(tile_ends_tab, span, live)) * TILE_ROWS
        length = tl.minimum(tl.load(span_count_tab + span, mask=live, other=0) - skipped, TILE_ROWS)
        pos = tl.load(span_start_tab + span, mask=live, other=0) + skipped
        out = tiles_tab + tile * 5
        tl.store(out, _start(row_ends_tab, span, live) + skipped, mask=live)
        tl.store(out + 1, length, mask=live)
        tl.store(out + 2, tl.load(span_slot_tab + span, mask=live, other=0), mask=live)
        tl.store(out + 3, tl.load(span_depth_tab + span, mask=live, other=0), mask=live)
        tl.store(out + 4, pos, mask=live)
        item_ends = items + tl.cumsum(tl.where(live, (pos + length + split - 1) // split, 0), 0)
        tl.store(item_ends_tab + tile, item_ends, mask=live)
        items = tl.max(item_ends, 0)
    tl.store(live_tab, items)
    tl.store(live_tab + 1, tiles)


@kernel
def expand(
    span_slot_tab, span_start_tab, span_depth_tab, row_ends_tab, page_tab, row_slot_tab, row_pos_tab, row_depth_tab,
    row_page_tab, row_offset_tab, item_ends_tab, live_tab, items_tab, rows, spans, steps, page_width, scratch_slot,
    scratch_page,
    PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Row fields of ``rows`` rows, those beyond the spans being padding; attention's items ``(tile, split)``.

    Program i writes rows and items ``i * BLOCK ...``. Items beyond the live ones are left as they were, and never read.
    """
    number = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = number < rows
    live = inside & (number < tl.load(row_ends_tab + spans - 1))
    span = _find(row_ends_tab, spans, number, steps)
    slot = tl.load(span_slot_tab + span, mask=live, other=scratch_slot)
    first = tl.load(span_start_tab + span, mask=live, other=0)
    pos = tl.where(live, first + number - _start(row_ends_tab, span, live), 0)
    page = tl.load(page_tab + slot.to(tl.int64) * page_width + pos // PAGE_SIZE, mask=live, other=scratch_page)
    tl.store(row_slot_tab + number, slot, mask=inside)
    tl.store(row_pos_tab + number, pos, mask=inside)
    tl.store(row_depth_tab + number, tl.load(span_depth_tab + span, mask=live, other=0), mask=inside)
    tl.store(row_page_tab + number, page, mask=inside)
    tl.store(row_offset_tab + number, pos % PAGE_SIZE, mask=inside)

    live = number < tl.load(live_tab)
    tile = _find(item_ends_tab, tl.load(live_tab + 1), number, steps)
    tl.store(items_tab + number * 2, tile, mask=live)
    tl.store(items_tab + number * 2 + 1, number - _start(item_ends_tab, tile, live), mask=live)
