"""The operator set in our own C++ (`csrc/`): float32 and bfloat16 on a CPU, one operator per call.

A row's result is the same bits for any number of rows, any place among them, any neighbours, and any number of
threads; it may differ between instruction sets.
"""

import os
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from wavegraph.errors import ConfigError
from wavegraph.model.io import Pools, StepIO
from wavegraph.model.ops import build
from wavegraph.model.ops.aten_sampling import AtenSampling
from wavegraph.model.sampling import Column

DTYPES = (torch.float32, torch.bfloat16)
"""What the C++ operators compute in."""


class CpuOps(AtenSampling):
    """`wavegraph.model.ops.base.Ops` over ``torch.ops.wavegraph``; sampling and scoring stay with ATen.

    ``isa`` is the instruction set in use: the one asked for here, else in ``$WAVEGRAPH_CPU_ISA``, else the best that
    this CPU runs. ``library`` is a file that `build.build_library` made; None finds it in the cache, or builds it and
    tells ``progress``.

    Raises `ConfigError` for an instruction set that is unknown or cannot run here, `build.BuildError` if the
    operators can be neither found nor built.
    """

    name = "cpu"
    dense_attention = False

    def __init__(
        self, isa: str | None = None, library: Path | None = None, progress: build.Progress | None = None
    ) -> None:
        self.library = build.ensure_loaded(progress) if library is None else build.load_library(library)
        self._ops = torch.ops.wavegraph
        self.isa = _choose_isa(isa or os.environ.get("WAVEGRAPH_CPU_ISA"))
        self._isa = self._ops.isas().index(self.isa)
        self._lanes: int = self._ops.lanes(self._isa)

    def pack_linear(self, weight: Tensor) -> Tensor:
        """Panels of ``2 * lanes`` outputs. Raises `ConfigError` for a dtype other than float32 and bfloat16."""
        return _pack(_panels(weight, 2 * self._lanes))

    def pack_gate_up(self, weight: Tensor) -> Tensor:
        """Panels of ``lanes`` gate outputs and the same up outputs. Raises as `pack_linear`."""
        gate, up = weight.chunk(2)
        return _pack(torch.cat((_panels(gate, self._lanes), _panels(up, self._lanes)), dim=1))

    def update_tables(self, io: StepIO) -> None:
        """Store all entries. Raises RuntimeError if one lies outside its table."""
        self._ops.update_tables.default(
            io.token_slot,
            io.token_pos,
            io.token_id,
            io.page_slot,
            io.page_index,
            io.page_id,
            io.param_slot,
            io.param_rows,
            io.token_table,
            io.page_table,
            io.params,
        )

    def prepare(self, io: StepIO, pools: Pools, rows: int) -> None:
        """Expand spans. Raises RuntimeError if a span, or a page it will read, lies outside tables and pools."""
        self._ops.prepare.default(
            io.span_slot,
            io.span_start,
            io.span_count,
            io.span_depth,
            io.page_table,
            io.row_slot,
            io.row_pos,
            io.row_depth,
            io.row_page,
            io.row_offset,
            rows,
            pools.k.shape[0],
            pools.page_size,
            pools.k.shape[1],
        )

    def gather(self, out: Tensor, io: StepIO, pools: Pools, embedding: Tensor, rows: int) -> None:
        """The embedding for rows at depth 0, else the hidden row; zero for padding."""
        self._ops.gather.default(
            out,
            embedding,
            pools.hidden,
            io.token_table,
            io.row_slot,
            io.row_pos,
            io.row_depth,
            io.row_page,
            io.row_offset,
            rows,
        )

    def norm(self, out: Tensor, x: Tensor, weight: Tensor, eps: float, rows: int) -> None:
        """out = rmsnorm(x) * weight."""
        self._ops.norm.default(out, x, weight, eps, rows, self._isa)

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
        self._ops.residual_norm.default(x, out, branch, branch_weight, next_weight, eps, rows, self._isa)

    def linear(self, out: Tensor, x: Tensor, weight: Tensor, rows: int) -> None:
        """out = x @ weight.T, summed in float32."""
        self._ops.linear.default(out, x, weight, rows, self._isa)

    def linear_silu_mul(self, out: Tensor, x: Tensor, weight: Tensor, rows: int) -> None:
        """out = silu(x @ gate.T) * (x @ up.T), summed in float32 and rounded after each of the four."""
        self._ops.linear_silu_mul.default(out, x, weight, rows, self._isa)

    def rope_write(
        self, qkv: Tensor, io: StepIO, pools: Pools, cos: Tensor, sin: Tensor, layer: int, rows: int
    ) -> None:
        """Rotate q and k in place; store k and v. Padding is left alone."""
        self._ops.rope_write.default(
            qkv,
            pools.k,
            pools.v,
            cos,
            sin,
            io.row_pos,
            io.row_depth,
            io.row_page,
            io.row_offset,
            layer,
            rows,
            self._isa,
        )

    def attention(self, out: Tensor, qkv: Tensor, io: StepIO, pools: Pools, layer: int, rows: int) -> None:
        """Online softmax over blocks of 64 positions, probabilities and sums in float32; zero for padding."""
        self._ops.attention.default(
            out,
            qkv,
            pools.k,
            pools.v,
            io.page_table,
            io.row_slot,
            io.row_pos,
            io.row_depth,
            io.row_page,
            layer,
            rows,
            self._isa,
        )

    def scatter_gate(
        self, h: Tensor, io: StepIO, pools: Pools, gate_weight: Tensor, gate_bias: Tensor, rows: int
    ) -> None:
        """The gate is a float32 dot per row. Padding is left alone."""
        self._ops.scatter_gate.default(
            h,
            pools.hidden,
            pools.gate,
            gate_weight,
            gate_bias,
            io.row_depth,
            io.row_page,
            io.row_offset,
            rows,
            self._isa,
        )

    def coda_gather(self, out: Tensor, io: StepIO, pools: Pools, rows: int) -> None:
        """out = hidden rows of the coda positions; zero for padding."""
        self._ops.coda_gather.default(out, pools.hidden, io.page_table, io.coda_slot, io.coda_pos, rows)

    def leave(self, io: StepIO, pools: Pools, rows: int) -> None:
        """Action and gate decide. Each sigmoid is computed in float64, then rounded to float32."""
        self._ops.leave.default(
            io.coda_left,
            pools.gate,
            io.page_table,
            io.params,
            io.coda_slot,
            io.coda_pos,
            io.coda_depth,
            io.coda_action,
            Column.EXIT_THRESHOLD,
            rows,
        )

    def draw_greedy(self, io: StepIO, rows: int) -> None:
        """The first of the largest logits. A NaN never wins; a row of nothing else gives token 0."""
        self._ops.draw_greedy.default(
            io.logits, io.coda_token, io.token_table, io.coda_left, io.coda_slot, io.coda_pos, rows, self._isa
        )

    def copy_exits(self, io: StepIO, pools: Pools, rows: int) -> None:
        """Copies for rows that want it; nothing else is written."""
        self._ops.copy_exits.default(
            pools.k,
            pools.v,
            io.page_table,
            io.params,
            io.coda_left,
            io.coda_slot,
            io.coda_pos,
            io.coda_depth,
            io.coda_action,
            Column.EXIT_COPY,
            rows,
        )


def usable_isas() -> tuple[str, ...]:
    """Instruction sets whose kernels were built and run on this CPU, the best last. Loads the library."""
    build.ensure_loaded()
    ops = torch.ops.wavegraph
    return tuple(name for index, name in enumerate(ops.isas()) if ops.lanes(index))


def _choose_isa(wanted: str | None) -> str:
    usable = usable_isas()
    if wanted is None:
        return usable[-1]
    if wanted not in usable:
        raise ConfigError(
            f"WAVEGRAPH_CPU_ISA: {wanted!r} cannot run here; choose one of {', '.join(usable)}, or none for the best"
        )
    return wanted


def _panels(weight: Tensor, width: int) -> Tensor:
    """``[out, in]`` -> ``[panels, width, in]``, the last panel filled up with zero rows."""
    if weight.dtype not in DTYPES:
        raise ConfigError(
            f"dtype: the C++ operators compute in float32 or bfloat16, got {weight.dtype}; choose one of the two, "
            "or the ATen operators"
        )
    return functional.pad(weight, (0, 0, 0, -weight.shape[0] % width)).reshape(-1, width, weight.shape[1])


def _pack(panels: Tensor) -> Tensor:
    """``[panels, columns, in]`` -> ``[panels, in, columns]``, or ``[panels, in / 2, columns, 2]`` in bfloat16."""
    if panels.dtype == torch.float32:
        return panels.transpose(1, 2).contiguous()
    pairs = functional.pad(panels, (0, panels.shape[2] % 2)).reshape(*panels.shape[:2], -1, 2)
    return pairs.transpose(1, 2).contiguous()
