"""The operator set in Triton kernels and cuBLAS: what the `cuda` backend captures.

Every operator is described as launches of kernels by name; a `Launcher` carries them out, so the same code runs through
Triton's JIT compiler, its interpreter, or binaries compiled before. Grids depend on ``rows`` and on the static tensors'
shapes alone: how much of attention's work list is live, the kernel reads on the device.
"""

import math

import torch
from torch import Tensor

from wavegraph.model.io import Pools, StepIO, Workspace
from wavegraph.model.ops.triton.coda import TritonCoda
from wavegraph.model.ops.triton.kit import cdiv, power, scratch_page, scratch_slot
from wavegraph.model.ops.triton.launch import Launcher
from wavegraph.model.ops.triton.scratch import Splits, most_tiles, partials, scratch_words, work_list
from wavegraph.model.sampling import PARAMS_WIDTH

TILE_ROWS = 16
"""Query rows of one tile of attention: the least that tensor cores take, and what a chunk of 16 needs."""

# Programs of kernels that take many small things each.
_ENTRIES = 128
_SPAN_BLOCK = 1024
_ROW_BLOCK = 128
_MERGE_HEADS = 16
_COLUMNS = 1024

# Tiles of the product under ``deterministic``.
_BLOCK_M, _BLOCK_N, _BLOCK_K = 64, 64, 64


class TritonOps(TritonCoda):
    """`wavegraph.model.ops.base.Ops` in Triton; matrix products by cuBLAS, or under ``deterministic`` by `gemm`.

    Under ``deterministic`` a row has the same bits at every bucket and beside any neighbours. ``programs`` is the most
    programs of attention, about two for each multiprocessor; it changes no bit. A prefix is cut into at most
    ``max_splits`` parts of at least ``min_split`` positions, at positions that depend on the page table's width alone.
    """

    name = "triton"
    dense_attention = False

    def __init__(
        self,
        launcher: Launcher,
        *,
        deterministic: bool = False,
        programs: int = 264,
        min_split: int = 512,
        max_splits: int = 16,
    ) -> None:
        super().__init__(launcher)
        self.deterministic = deterministic
        self._programs = programs
        self._min_split, self._max_splits = min_split, max_splits

    def pack_linear(self, weight: Tensor) -> Tensor:
        """The weight itself."""
        return weight

    def pack_gate_up(self, weight: Tensor) -> Tensor:
        """The weight itself."""
        return weight

    def scratch_size(self, io: StepIO, pools: Pools, work: Workspace) -> int:
        """Attention's work list, and the results of splits for all rows."""
        head_dim = pools.k.shape[5]
        return scratch_words(io, self._splits(io, pools), work.attn.shape[1] // head_dim, head_dim, TILE_ROWS)

    def update_tables(self, io: StepIO) -> None:
        """Store entries that are in use."""
        entries, param_entries = io.token_slot.shape[0], io.param_slot.shape[0]
        self._launch(
            "update_tables",
            (max(cdiv(entries, _ENTRIES), param_entries), 1),
            {
                "token_slot_tab": io.token_slot,
                "token_pos_tab": io.token_pos,
                "token_id_tab": io.token_id,
                "page_slot_tab": io.page_slot,
                "page_index_tab": io.page_index,
                "page_id_tab": io.page_id,
                "param_slot_tab": io.param_slot,
                "param_rows_tab": io.param_rows,
                "token_tab": io.token_table,
                "page_tab": io.page_table,
                "params_tab": io.params,
                "entries": entries,
                "param_entries": param_entries,
                "token_width": io.token_table.shape[1],
                "page_width": io.page_table.shape[1],
                "scratch_slot": scratch_slot(io),
            },
            {"BLOCK": _ENTRIES, "WIDTH": PARAMS_WIDTH, "WIDTH_BLOCK": power(PARAMS_WIDTH)},
        )

    def prepare(self, io: StepIO, pools: Pools, rows: int) -> None:
        """Cut spans into tiles; then expand them to rows, and tiles to attention's work list."""
        splits, spans = self._splits(io, pools), io.span_slot.shape[0]
        work, tiles = work_list(io, splits, TILE_ROWS), most_tiles(rows, spans, TILE_ROWS)
        span_tables = {
            "span_slot_tab": io.span_slot,
            "span_start_tab": io.span_start,
            "span_count_tab": io.span_count,
            "span_depth_tab": io.span_depth,
            "row_ends_tab": work.row_ends,
        }
        steps = max(spans, tiles).bit_length()
        self._launch(
            "plan_tiles",
            (1, 1),
            {
                **span_tables,
                "tile_ends_tab": work.tile_ends,
                "tiles_tab": work.tiles,
                "item_ends_tab": work.item_ends,
                "live_tab": work.live,
                "spans": spans,
                "steps": steps,
                "split": splits.length,
            },
            {"TILE_ROWS": TILE_ROWS, "BLOCK": _SPAN_BLOCK},
            num_warps=8,
        )
        span_tables.pop("span_count_tab")
        self._launch(
            "expand",
            (cdiv(max(rows, tiles * splits.count), _ROW_BLOCK), 1),
            {
                **span_tables,
                "page_tab": io.page_table,
                "row_slot_tab": io.row_slot,
                "row_pos_tab": io.row_pos,
                "row_depth_tab": io.row_depth,
                "row_page_tab": io.row_page,
                "row_offset_tab": io.row_offset,
                "item_ends_tab": work.item_ends,
                "live_tab": work.live,
                "items_tab": work.items,
                "rows": rows,
                "spans": spans,
                "steps": steps,
                "page_width": io.page_table.shape[1],
                "scratch_slot": scratch_slot(io),
                "scratch_page": scratch_page(pools),
            },
            {"PAGE_SIZE": pools.page_size, "BLOCK": _ROW_BLOCK},
        )

    def gather(self, out: Tensor, io: StepIO, pools: Pools, embedding: Tensor, rows: int) -> None:
        """The embedding for rows at depth 0, else the hidden row; zero for padding."""
        hidden = out.shape[1]
        self._launch(
            "gather",
            (rows, 1),
            {
                "out_ptr": out,
                "embedding_ptr": embedding,
                "hidden_ptr": pools.hidden,
                "token_tab": io.token_table,
                "row_slot_tab": io.row_slot,
                "row_pos_tab": io.row_pos,
                "row_depth_tab": io.row_depth,
                "row_page_tab": io.row_page,
                "row_offset_tab": io.row_offset,
                "token_width": io.token_table.shape[1],
                "scratch_slot": scratch_slot(io),
            },
            {"HIDDEN": hidden, "PAGE_SIZE": pools.page_size, "BLOCK": power(hidden)},
        )

    def norm(self, out: Tensor, x: Tensor, weight: Tensor, eps: float, rows: int) -> None:
        """out = rmsnorm(x) * weight."""
        hidden = x.shape[1]
        self._launch(
            "norm",
            (rows, 1),
            {"out_ptr": out, "x_ptr": x, "weight_ptr": weight, "eps": eps},
            {"HIDDEN": hidden, "BLOCK": power(hidden)},
            num_warps=_row_warps(hidden),
        )

    def residual_norm(
        self,
        x: Tensor,
        out: Tensor,
        branch: Tensor,
        branch_weight: Tensor,
        next_weight: Tensor,
        eps: float,
        rows: int,
    ) -> None:
        """x += rmsnorm(branch) * branch_weight; then out = rmsnorm(x) * next_weight."""
        hidden = x.shape[1]
        self._launch(
            "residual_norm",
            (rows, 1),
            {
                "x_ptr": x,
                "out_ptr": out,
                "branch_ptr": branch,
                "branch_weight_ptr": branch_weight,
                "next_weight_ptr": next_weight,
                "eps": eps,
            },
            {"HIDDEN": hidden, "BLOCK": power(hidden)},
            num_warps=_row_warps(hidden),
        )

    def linear(self, out: Tensor, x: Tensor, weight: Tensor, rows: int) -> None:
        """out = x @ weight.T."""
        if not self.deterministic:
            torch.mm(x[:rows], weight.t(), out=out[:rows])
            return
        outputs, inputs = weight.shape
        self._launch(
            "gemm",
            (cdiv(rows, _BLOCK_M), cdiv(outputs, _BLOCK_N)),
            {"out_ptr": out, "x_ptr": x, "weight_ptr": weight, "rows": rows},
            {
                "OUTPUTS": outputs,
                "INPUTS": inputs,
                "BLOCK_M": _BLOCK_M,
                "BLOCK_N": _BLOCK_N,
                "BLOCK_K": _BLOCK_K if x.dtype != torch.float32 else _BLOCK_K // 2,
                "PRECISION": "ieee",
            },
            num_stages=3,
        )

    def linear_silu_mul(self, out: Tensor, x: Tensor, weight: Tensor, rows: int) -> None:
        """out = silu(x @ gate.T) * (x @ up.T); the product of both is the program's own."""
        width = out.shape[1]
        gate_up = torch.empty((rows, 2 * width), dtype=x.dtype, device=x.device)
        self.linear(gate_up, x, weight, rows)
        block = min(_COLUMNS, power(width))
        self._launch(
            "silu_mul",
            (rows, cdiv(width, block)),
            {"out_ptr": out, "gate_up_ptr": gate_up},
            {"WIDTH": width, "BLOCK": block},
        )

    def rope_write(
        self, qkv: Tensor, io: StepIO, pools: Pools, cos: Tensor, sin: Tensor, layer: int, rows: int
    ) -> None:
        """Rotate q and k in place; store k and v. Padding is left alone."""
        shape = _plane_shape(pools)
        heads = qkv.shape[1] // shape["HEAD_DIM"] - 2 * shape["KV_HEADS"]
        block = min(8, power(heads + 2 * shape["KV_HEADS"]))
        self._launch(
            "rope_write",
            (rows, cdiv(heads + 2 * shape["KV_HEADS"], block)),
            {
                "qkv_ptr": qkv,
                "k_ptr": pools.k,
                "v_ptr": pools.v,
                "cos_ptr": cos,
                "sin_ptr": sin,
                "row_pos_tab": io.row_pos,
                "row_depth_tab": io.row_depth,
                "row_page_tab": io.row_page,
                "row_offset_tab": io.row_offset,
                "layer": layer,
                "scratch_page": scratch_page(pools),
            },
            {"HEADS": heads, **shape, "BLOCK_H": block, "BLOCK_D": power(shape["HEAD_DIM"] // 2)},
            num_warps=2,
        )

    def attention(self, out: Tensor, qkv: Tensor, io: StepIO, pools: Pools, layer: int, rows: int) -> None:
        """Online softmax over blocks of keys, float32 sums; padding rows are left alone."""
        shape, splits = _plane_shape(pools), self._splits(io, pools)
        head_dim = shape["HEAD_DIM"]
        heads = out.shape[1] // head_dim
        work = work_list(io, splits, TILE_ROWS)
        partial, lse = partials(io, splits, heads, head_dim, TILE_ROWS)
        items = most_tiles(rows, io.span_slot.shape[0], TILE_ROWS) * splits.count
        block_d = max(16, power(head_dim))
        self._launch(
            "attention",
            (min(self._programs, items * heads), 1),
            {
                "out_ptr": out,
                "partial_ptr": partial,
                "lse_ptr": lse,
                "qkv_ptr": qkv,
                "k_ptr": pools.k,
                "v_ptr": pools.v,
                "tiles_tab": work.tiles,
                "items_tab": work.items,
                "live_tab": work.live,
                "page_tab": io.page_table,
                "layer": layer,
                "page_width": io.page_table.shape[1],
                "split": splits.length,
                "splits": splits.count,
                "scale": head_dim**-0.5 * math.log2(math.e),
            },
            {
                "HEADS": heads,
                **shape,
                "TILE_ROWS": TILE_ROWS,
                "BLOCK_N": key_block(block_d, qkv.dtype),
                "BLOCK_D": block_d,
                "PRECISION": "ieee",
            },
            num_stages=2,
        )
        if splits.count > 1:
            block = min(_MERGE_HEADS, power(heads))
            self._launch(
                "merge_splits",
                (rows, cdiv(heads, block)),
                {
                    "out_ptr": out,
                    "partial_ptr": partial,
                    "lse_ptr": lse,
                    "row_pos_tab": io.row_pos,
                    "row_page_tab": io.row_page,
                    "split": splits.length,
                    "splits": splits.count,
                    "scratch_page": scratch_page(pools),
                },
                {"HEADS": heads, "HEAD_DIM": head_dim, "BLOCK_H": block, "BLOCK_D": power(head_dim)},
            )

    def scatter_gate(
        self, h: Tensor, io: StepIO, pools: Pools, gate_weight: Tensor, gate_bias: Tensor, rows: int
    ) -> None:
        """The gate is a float32 dot per row. Padding is left alone."""
        hidden = h.shape[1]
        self._launch(
            "scatter_gate",
            (rows, 1),
            {
                "h_ptr": h,
                "hidden_ptr": pools.hidden,
                "gate_ptr": pools.gate,
                "weight_ptr": gate_weight,
                "bias_ptr": gate_bias,
                "row_depth_tab": io.row_depth,
                "row_page_tab": io.row_page,
                "row_offset_tab": io.row_offset,
                "scratch_page": scratch_page(pools),
            },
            {
                "HIDDEN": hidden,
                "PAGE_SIZE": pools.page_size,
                "DEPTHS": pools.gate.shape[2],
                "BLOCK": power(hidden),
            },
        )

    def _splits(self, io: StepIO, pools: Pools) -> Splits:
        capacity = io.page_table.shape[1] * pools.page_size
        return Splits.of(capacity, self._min_split, self._max_splits, 64)


def key_block(block_d: int, dtype: torch.dtype) -> int:
    """Keys of one block of attention: two stages of K and V of the widest head fit an SM of every target."""
    return 64 if block_d * dtype.itemsize <= 512 else 32


def _plane_shape(pools: Pools) -> dict[str, int]:
    _, depths, layers, page_size, kv_heads, head_dim = pools.k.shape
    return {
        "KV_HEADS": kv_heads,
        "HEAD_DIM": head_dim,
        "PAGE_SIZE": page_size,
        "DEPTHS": depths,
        "LAYERS": layers,
    }


def _row_warps(hidden: int) -> int:
    return 4 if hidden <= 4096 else 8
