"""The operators of CODA: hidden rows, exits, draws and scores."""

import torch
from torch import Tensor

from wavegraph.model.io import Pools, StepIO
from wavegraph.model.ops.triton.kit import Kernels, cdiv, power, scratch_slot
from wavegraph.model.sampling import PARAMS_WIDTH, Action, Column

_CODA_BLOCK = 32
_VOCAB_BLOCK = 4096
_SAMPLER_BLOCK = 1024
_PICK_BLOCK = 1024
_HISTORY_BLOCK = 1024


class TritonCoda(Kernels):
    """The part of `wavegraph.model.ops.base.Ops` that CODA runs, apart from the language head."""

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

    def draw(self, io: StepIO, rows: int) -> None:
        """Order the final logits, weigh them, and find the token by bisection over masses that are exact integers."""
        vocab = io.logits.shape[1]
        block = min(_SAMPLER_BLOCK, power(vocab))
        row = {"left_tab": io.coda_left, "coda_slot_tab": io.coda_slot, "coda_pos_tab": io.coda_pos}
        counts = torch.zeros((rows, vocab), dtype=torch.int32, device=io.logits.device)
        order, top = torch.empty_like(counts), counts.new_full((rows,), -(2**31))
        weight = torch.empty((rows, vocab), dtype=torch.int64, device=io.logits.device)
        self._launch(
            "count_tokens",
            (rows, cdiv(io.token_table.shape[1], _HISTORY_BLOCK)),
            {
                "counts_ptr": counts,
                "token_tab": io.token_table,
                "params_tab": io.params,
                **row,
                "token_width": io.token_table.shape[1],
            },
            {
                "VOCAB": vocab,
                "PARAMS": PARAMS_WIDTH,
                **_columns("PROMPT_LEN", "REPETITION", "PRESENCE", "FREQUENCY"),
                "BLOCK": _HISTORY_BLOCK,
            },
        )
        self._launch(
            "order_logits",
            (rows, cdiv(vocab, block)),
            {
                "order_ptr": order,
                "top_ptr": top,
                "logits_ptr": io.logits,
                "counts_ptr": counts,
                "params_tab": io.params,
                **row,
            },
            {
                "VOCAB": vocab,
                "PARAMS": PARAMS_WIDTH,
                **_columns("PROMPT_LEN", "MIN_TOKENS", "STOP_COUNT", "BIAS_COUNT"),
                **_columns("REPETITION", "PRESENCE", "FREQUENCY", "STOP_IDS", "BIAS_IDS", "BIAS_VALUES"),
                "BLOCK": block,
            },
            fp_fusion=False,
        )
        self._launch(
            "weigh",
            (rows, cdiv(vocab, block)),
            {
                "weight_ptr": weight,
                "order_ptr": order,
                "top_ptr": top,
                "params_tab": io.params,
                "left_tab": io.coda_left,
                "coda_slot_tab": io.coda_slot,
            },
            {"VOCAB": vocab, "PARAMS": PARAMS_WIDTH, **_columns("TEMPERATURE"), "BLOCK": block},
        )
        self._launch(
            "pick",
            (rows, 1),
            {
                "order_ptr": order,
                "weight_ptr": weight,
                "top_ptr": top,
                "token_out_tab": io.coda_token,
                "token_tab": io.token_table,
                "params_tab": io.params,
                **row,
                "token_width": io.token_table.shape[1],
            },
            {
                "VOCAB": vocab,
                "PARAMS": PARAMS_WIDTH,
                **_columns("SEED_LOW", "SEED_HIGH", "TOP_K", "TEMPERATURE", "TOP_P", "MIN_P"),
                "BLOCK": min(_PICK_BLOCK, power(vocab)),
            },
            num_warps=16,
        )

    def score(self, io: StepIO, rows: int) -> None:
        """Log-softmax in float32; the most likely tokens one after another."""
        vocab = io.logits.shape[1]
        self._launch(
            "score",
            (rows, 1),
            {
                "logprob_tab": io.coda_logprob,
                "rank_tab": io.coda_rank,
                "top_ids_tab": io.top_ids,
                "top_logprobs_tab": io.top_logprobs,
                "logits_ptr": io.logits,
                "token_out_tab": io.coda_token,
                "token_tab": io.token_table,
                "coda_slot_tab": io.coda_slot,
                "coda_pos_tab": io.coda_pos,
                "coda_action_tab": io.coda_action,
                "token_width": io.token_table.shape[1],
                "scratch_slot": scratch_slot(io),
            },
            {
                "VOCAB": vocab,
                "TOP": io.top_ids.shape[1],
                "SCORE": int(Action.SCORE),
                "BLOCK": min(_VOCAB_BLOCK, power(vocab)),
            },
            num_warps=16,
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


def _columns(*names: str) -> dict[str, int]:
    """Where parameters lie, by the names of the kernels' constants."""
    return {name: int(Column[name]) for name in names}
