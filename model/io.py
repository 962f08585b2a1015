"""The static tensors that CORE and CODA read and write.

Allocated once by the capture room and never moved; a recorded program holds their addresses. Sizes:
``B`` is the largest core bucket, ``C`` the largest coda bucket, ``S`` the most spans in a step, ``N`` the
number of request slots, ``G`` the number of pages. Slot ``N`` is the scratch request and page ``G`` the
scratch page: padding reads and writes only those, and no request can own them.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class StepIO:
    """Inputs, device tables, row fields and outputs of one step. All int32 unless said.

    Inputs, views of one packed buffer (unused entries point at scratch, span counts there are 0):

    - ``header [8]``: live spans, live rows, coda rows, token updates, page updates; the rest is 0
    - ``span_slot, span_start, span_count, span_depth [S]``: row ``start + i`` of request ``slot`` at ``depth``;
      rows are laid out span after span
    - ``token_slot, token_pos, token_id [B]``: prompt tokens to store before the step
    - ``page_slot, page_index, page_id [B]``: page table entries to store before the step
    - ``coda_slot, coda_pos [C]``: positions whose hidden row goes through CODA

    Device tables:

    - ``token_table [N + 1, max_model_len + 1]``: token of each position; CODA writes position ``pos + 1``
    - ``page_table [N + 1, pages_per_request]``: page of each block of ``page_size`` positions; row N is all G

    Written by `Ops.prepare` for the rows of the running bucket: ``row_slot, row_pos, row_depth, row_page,
    row_offset [B]``; padding rows hold ``(N, 0, 0, G, 0)``.

    Outputs: ``gate_logits [B]`` float32, ``logits [C, V]`` in the model's dtype, ``coda_token [C]``.
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
    coda_slot: Tensor
    coda_pos: Tensor
    token_table: Tensor
    page_table: Tensor
    row_slot: Tensor
    row_pos: Tensor
    row_depth: Tensor
    row_page: Tensor
    row_offset: Tensor
    gate_logits: Tensor
    logits: Tensor
    coda_token: Tensor


@dataclass(frozen=True, slots=True)
class Pools:
    """Paged storage, addressed by one page table per request.

    ``k, v [G + 1, D, L, page_size, kv_heads, head_dim]`` and ``hidden [G + 1, page_size, H]``, in the model's
    dtype. Keys are stored after RoPE. ``hidden`` holds, for each position, the state after its deepest
    finished depth.
    """

    k: Tensor
    v: Tensor
    hidden: Tensor

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
