"""The static tensors that CORE and CODA read and write.

Allocated once by the capture room and never moved; a recorded program holds their addresses. Sizes:
``B`` is the largest core bucket, ``C`` the largest coda bucket, ``S`` the most spans in a step, ``N`` the
number of request slots, ``G`` the number of pages, ``W`` the width of a request's parameters
(`wavegraph.model.sampling`), ``A`` the most parameter updates in one packed buffer. Slot ``N`` is the scratch
request and page ``G`` the scratch page: padding reads and writes only those, and no request can own them.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor


def _nothing() -> Tensor:
    return torch.empty(0, dtype=torch.int32)


@dataclass(frozen=True, slots=True)
class StepIO:
    """Inputs, device tables, row fields and outputs of one step. All int32 unless said.

    Inputs, views of one packed buffer (unused entries point at scratch, span counts there are 0):

    - ``header [8]``: live spans, live rows, coda rows, token updates, page updates, parameter updates; the rest
      is 0
    - ``span_slot, span_start, span_count, span_depth [S]``: row ``start + i`` of request ``slot`` at ``depth``;
      rows are laid out span after span
    - ``token_slot, token_pos, token_id [B]``: prompt tokens to store before the step
    - ``page_slot, page_index, page_id [B]``: page table entries to store before the step
    - ``param_slot [A]``, ``param_rows [A, W]``: parameters of requests to store before the step
    - ``coda_slot, coda_pos, coda_depth, coda_action [C]``: positions whose hidden row goes through CODA, the depth
      it comes from, and a `wavegraph.model.sampling.Action`; unused entries are ``(N, 0, 0, SCORE)``

    Device tables:

    - ``token_table [N + 1, max_model_len + 1]``: token of each position; CODA writes position ``pos + 1``
    - ``page_table [N + 1, pages_per_request]``: page of each block of ``page_size`` positions; row N is all G
    - ``params [N + 1, W]``: parameters of each request, floats as their bits (`wavegraph.model.sampling.Column`)

    Written by `Ops.prepare` for the rows of the running bucket: ``row_slot, row_pos, row_depth, row_page,
    row_offset [B]``; padding rows hold ``(N, 0, 0, G, 0)``.

    Outputs of CODA, for the rows of the running bucket:

    - ``logits [C, V]`` in the model's dtype
    - ``coda_left [C]``: 1 for a row that leaves the loop here and draws a token, else 0
    - ``coda_token [C]``: the token drawn, -1 for a row that drew none

    and, by the full program only, of the raw logits and the token drawn (for ``SCORE`` rows the token after the
    row; of no meaning for other rows that drew none):

    - ``coda_logprob [C]`` float32: the token's log-probability
    - ``coda_rank [C]``: how many logits are strictly larger than the token's
    - ``top_ids [C, T]``, ``top_logprobs [C, T]`` float32: the T = min(MAX_TOP_LOGPROBS, V) most likely tokens, ties
      by token id

    ``scratch [Ops.scratch_size]`` is the operator set's own; its content means nothing between programs.
    """

    header: Tensor
    span_slot: Tensor
    span_start: Tensor
    span_count: Tensor
    span_depth: Tensor
    token_slot: Tensor
    token_pos: Tensor
    token_id: Tensor
    page_slot: Tensor
    page_index: Tensor
    page_id: Tensor
    param_slot: Tensor
    param_rows: Tensor
    coda_slot: Tensor
    coda_pos: Tensor
    coda_depth: Tensor
    coda_action: Tensor
    token_table: Tensor
    page_table: Tensor
    params: Tensor
    row_slot: Tensor
    row_pos: Tensor
    row_depth: Tensor
    row_page: Tensor
    row_offset: Tensor
    logits: Tensor
    coda_left: Tensor
    coda_token: Tensor
    coda_logprob: Tensor
    coda_rank: Tensor
    top_ids: Tensor
    top_logprobs: Tensor
    scratch: Tensor = field(default_factory=_nothing)


@dataclass(frozen=True, slots=True)
class Pools:
    """Paged storage, addressed by one page table per request.

    ``k, v [G + 1, D, L, page_size, kv_heads, head_dim]`` and ``hidden [G + 1, page_size, H]``, in the model's
    dtype. Keys are stored after RoPE. ``hidden`` holds, for each position, the state after its deepest
    finished depth. ``gate [G + 1, page_size, D]`` float32 holds the exit gate's logit of each finished depth; what
    a position's exit needs is derived from it, so it moves with the page and is never reset: entries of depths that
    did not run yet are garbage.
    """

    k: Tensor
    v: Tensor
    hidden: Tensor
    gate: Tensor

    @property
    def page_size(self) -> int:
        """Positions per page."""
        return self.hidden.shape[1]


@dataclass(frozen=True, slots=True)
class Workspace:
    """Intermediates shared by all buckets; a bucket of R rows uses the first R rows. Model dtype.

    ``x, normed, branch [B, H]``, ``qkv [B, (heads + 2 kv_heads) d]``, ``attn [B, heads d]``,
    ``mlp [B, I]``, ``coda_x [C, H]``.
    """

    x: Tensor
    normed: Tensor
    branch: Tensor
    qkv: Tensor
    attn: Tensor
    mlp: Tensor
    coda_x: Tensor
