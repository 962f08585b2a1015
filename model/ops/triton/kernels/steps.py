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
def _find(ends, number):
    """How many of ``ends [S]`` do not exceed each ``number [N]``: the place of the interval that holds it."""
    return tl.sum((ends[None, :] <= number[:, None]).to(tl.int32), axis=1)


@triton.jit
def _start(ends, number):
    """The largest of ``ends [S]`` that does not exceed each ``number [N]``, or 0: where its interval starts."""
    return tl.max(tl.where(ends[None, :] <= number[:, None], ends[None, :], 0), axis=1)


@kernel
def expand(
    span_slot_tab, span_start_tab, span_count_tab, span_depth_tab, page_tab, row_slot_tab, row_pos_tab, row_depth_tab,
    row_page_tab, row_offset_tab, tiles_tab, splits_tab, rows, tiles, spans, page_width, scratch_slot, scratch_page,
    split,
    SPANS: tl.constexpr, PAGE_SIZE: tl.constexpr, TILE_ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Row fields of ``rows`` rows; tiles of at most TILE_ROWS rows of one span, and the splits of their prefixes.

    Program i writes rows and tiles ``i * BLOCK ...``. Rows beyond the spans are padding, tiles beyond them get
    no split. A tile is ``(first row, rows, slot, depth, position of the first row)``.
    """
    number = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    span = tl.arange(0, SPANS)
    count = tl.load(span_count_tab + span, mask=span < spans, other=0)
    row_ends = tl.cumsum(count, 0)
    tile_ends = tl.cumsum((count + TILE_ROWS - 1) // TILE_ROWS, 0)

    inside = number < rows
    live = inside & (number < tl.max(row_ends, 0))
    owner = _find(row_ends, number)
    slot = tl.load(span_slot_tab + owner, mask=live, other=scratch_slot)
    first = tl.load(span_start_tab + owner, mask=live, other=0)
    pos = tl.where(live, first + number - _start(row_ends, number), 0)
    page = tl.load(page_tab + slot.to(tl.int64) * page_width + pos // PAGE_SIZE, mask=live, other=scratch_page)
    tl.store(row_slot_tab + number, slot, mask=inside)
    tl.store(row_pos_tab + number, pos, mask=inside)
    tl.store(row_depth_tab + number, tl.load(span_depth_tab + owner, mask=live, other=0), mask=inside)
    tl.store(row_page_tab + number, page, mask=inside)
    tl.store(row_offset_tab + number, pos % PAGE_SIZE, mask=inside)

    inside = number < tiles
    live = inside & (number < tl.max(tile_ends, 0))
    owner = _find(tile_ends, number)
    skipped = (number - _start(tile_ends, number)) * TILE_ROWS
    length = tl.minimum(tl.load(span_count_tab + owner, mask=live, other=0) - skipped, TILE_ROWS)
    pos = tl.load(span_start_tab + owner, mask=live, other=0) + skipped
    rows_before = tl.sum(tl.where(span[None, :] < owner[:, None], count[None, :], 0), axis=1)
    tile = tiles_tab + number * 5
    tl.store(tile, rows_before + skipped, mask=live)
    tl.store(tile + 1, length, mask=live)
    tl.store(tile + 2, tl.load(span_slot_tab + owner, mask=live, other=scratch_slot), mask=live)
    tl.store(tile + 3, tl.load(span_depth_tab + owner, mask=live, other=0), mask=live)
    tl.store(tile + 4, pos, mask=live)
    tl.store(splits_tab + number, tl.where(live, (pos + length + split - 1) // split, 0), mask=inside)


@kernel
def list_items(
    splits_tab, items_tab, live_tab, tiles,
    TILES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Attention's work list, ``(tile, split)`` an item, and how many items are live.

    Program i writes items ``i * BLOCK ...``; what lies beyond the live ones is left as it was, and never read.
    """
    tile = tl.arange(0, TILES)
    ends = tl.cumsum(tl.load(splits_tab + tile, mask=tile < tiles, other=0), 0)
    live = tl.max(ends, 0)
    first = tl.program_id(0) * BLOCK
    if first == 0:
        tl.store(live_tab, live)
    if first < live:
        item = first + tl.arange(0, BLOCK)
        tl.store(items_tab + item * 2, _find(ends, item), mask=item < live)
        tl.store(items_tab + item * 2 + 1, item - _start(ends, item), mask=item < live)
