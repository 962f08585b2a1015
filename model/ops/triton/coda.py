"""The operators of CODA: hidden rows, exits and the greedy draw in Triton, sampling in ATen."""

from torch import Tensor

from wavegraph.model.io import Pools, StepIO
from wavegraph.model.ops.aten_sampling import AtenSampling
from wavegraph.model.ops.triton.kit import Kernels, cdiv, power, scratch_slot
from wavegraph.model.sampling import PARAMS_WIDTH, Action, Column

_CODA_BLOCK = 32
_VOCAB_BLOCK = 4096


class TritonCoda(Kernels, AtenSampling):
    """The part of `wavegraph.model.ops.base.Ops` that CODA runs, apart from the language head.

    Sampling by a request's own parameters, and scores, are ATen operators: they need the vocabulary in order, which
    one sort gives; every one of them has a fixed shape and waits for nothing, so that graphs hold them too.
    """

    def coda_gather(self, out: Tensor, io: StepIO, pools: Pools, rows: int) -> None:
        """out = hidden rows of the coda positions; zero for padding."""
        hidden = out.shape[1]
        self._launch(
            "coda_gather",
            (rows, 1),
            {
                "out_ptr": out,
                "hidden_ptr": pools.hidden,
                "page_tab": io.page_table,
                "coda_slot_tab": io.coda_slot,
                "coda_pos_tab": io.coda_pos,
                "page_width": io.page_table.shape[1],
                "scratch_slot": scratch_slot(io),
            },
            {"HIDDEN": hidden, "PAGE_SIZE": pools.page_size, "BLOCK": power(hidden)},
        )

    def leave(self, io: StepIO, pools: Pools, rows: int) -> None:
        """Action and gate decide. Each sigmoid is computed in float64, then rounded to float32."""
        self._launch(
            "leave",
            (cdiv(rows, _CODA_BLOCK), 1),
            {
                "left_tab": io.coda_left,
                "gate_ptr": pools.gate,
                "page_tab": io.page_table,
                "params_tab": io.params,
                "coda_slot_tab": io.coda_slot,
                "coda_pos_tab": io.coda_pos,
                "coda_depth_tab": io.coda_depth,
                "coda_action_tab": io.coda_action,
                "rows": rows,
                "page_width": io.page_table.shape[1],
            },
            {
                "PAGE_SIZE": pools.page_size,
                "DEPTHS": pools.gate.shape[2],
                "PARAMS": PARAMS_WIDTH,
                "THRESHOLD": int(Column.EXIT_THRESHOLD),
                "SAMPLE": int(Action.SAMPLE),
                "GATE": int(Action.GATE),
                "BLOCK": _CODA_BLOCK,
            },
            num_warps=1,
            fp_fusion=False,
        )

    def draw_greedy(self, io: StepIO, rows: int) -> None:
        """The first of the largest logits. A NaN never wins; a row of nothing else gives token 0."""
        vocab = io.logits.shape[1]
        self._launch(
            "draw_greedy",
            (rows, 1),
            {
                "logits_ptr": io.logits,
                "token_out_tab": io.coda_token,
                "token_tab": io.token_table,
                "left_tab": io.coda_left,
                "coda_slot_tab": io.coda_slot,
                "coda_pos_tab": io.coda_pos,
                "token_width": io.token_table.shape[1],
            },
            {"VOCAB": vocab, "BLOCK": min(_VOCAB_BLOCK, power(vocab))},
            num_warps=8,
        )

    def copy_exits(self, io: StepIO, pools: Pools, rows: int) -> None:
        """Copies for rows that want it; nothing else is written."""
        depths, layers, page_size, kv_heads, head_dim = pools.k.shape[1:]
        self._launch(
            "copy_exits",
            (rows, layers),
            {
                "k_ptr": pools.k,
                "v_ptr": pools.v,
                "page_tab": io.page_table,
                "params_tab": io.params,
                "left_tab": io.coda_left,
                "coda_slot_tab": io.coda_slot,
                "coda_pos_tab": io.coda_pos,
                "coda_depth_tab": io.coda_depth,
                "coda_action_tab": io.coda_action,
                "page_width": io.page_table.shape[1],
                "scratch_slot": scratch_slot(io),
            },
            {
                "PAGE_SIZE": page_size,
                "DEPTHS": depths,
                "LAYERS": layers,
                "KV_SIZE": kv_heads * head_dim,
                "PARAMS": PARAMS_WIDTH,
                "EXIT_COPY": int(Column.EXIT_COPY),
                "REPLAY": int(Action.REPLAY),
                "BLOCK": power(kv_heads * head_dim),
            },
        )
