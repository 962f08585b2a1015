"""The operator set in ATen operators alone: runs wherever torch does, and is what `recorded` captures.

All shapes depend on ``rows`` and on the static tensors' shapes, never on data. Rounding follows the public
reference's eager path: statistics and softmax in float32, everything else in the model's dtype.
"""

import torch
from torch import Tensor
from torch.nn import functional

from wavegraph.model.io import Pools, StepIO
from wavegraph.model.ops.aten_sampling import AtenSampling, pages_of

# Most elements of keys gathered at once: bounds temporary memory, whatever the row count and context.
_GATHER_LIMIT = 1 << 23


class AtenOps(AtenSampling):
    """`wavegraph.model.ops.base.Ops` in ATen operators. Weights are used as they are (no packing)."""

    name = "aten"
    dense_attention = True

    def pack_linear(self, weight: Tensor) -> Tensor:
        """The weight itself."""
        return weight

    def pack_gate_up(self, weight: Tensor) -> Tensor:
        """The weight itself."""
        return weight

    def update_tables(self, io: StepIO) -> None:
        """Store all entries; those not in use go to scratch."""
        io.token_table.index_put_((io.token_slot.long(), io.token_pos.long()), io.token_id)
        io.page_table.index_put_((io.page_slot.long(), io.page_index.long()), io.page_id)
        io.params.index_put_((io.param_slot.long(),), io.param_rows)

    def prepare(self, io: StepIO, pools: Pools, rows: int) -> None:
        """Row r belongs to the first span that ends beyond r."""
        ends = io.span_count.cumsum(0)
        row = torch.arange(rows, device=ends.device)
        live = row < ends[-1]
        # Rows beyond the last span would index one past it; they are replaced by scratch below.
        span = torch.searchsorted(ends, row, right=True).clamp_(max=ends.shape[0] - 1)
        first = ends - io.span_count - io.span_start
        scratch_slot = io.token_table.shape[0] - 1
        slot = torch.where(live, io.span_slot[span], scratch_slot)
        pos = torch.where(live, row - first[span], 0)
        io.row_slot[:rows].copy_(slot)
        io.row_pos[:rows].copy_(pos)
        io.row_depth[:rows].copy_(torch.where(live, io.span_depth[span], 0))
        io.row_page[:rows].copy_(pages_of(io, pools, slot, pos))
        io.row_offset[:rows].copy_(pos % pools.page_size)

    def gather(self, out: Tensor, io: StepIO, pools: Pools, embedding: Tensor, rows: int) -> None:
        """The embedding for rows at depth 0, else the hidden row."""
        embedded = embedding[io.token_table[io.row_slot[:rows].long(), io.row_pos[:rows].long()].long()]
        hidden = pools.hidden[io.row_page[:rows].long(), io.row_offset[:rows].long()]
        torch.where((io.row_depth[:rows] == 0).unsqueeze(1), embedded, hidden, out=out[:rows])

    def norm(self, out: Tensor, x: Tensor, weight: Tensor, eps: float, rows: int) -> None:
        """out = rmsnorm(x) * weight."""
        torch.mul(_normalised(x[:rows], eps), weight, out=out[:rows])

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
        x[:rows].add_(_normalised(branch[:rows], eps).mul_(branch_weight))
        self.norm(out, x, next_weight, eps, rows)

    def linear(self, out: Tensor, x: Tensor, weight: Tensor, rows: int) -> None:
        """out = x @ weight.T."""
        torch.mm(x[:rows], weight.t(), out=out[:rows])

    def linear_silu_mul(self, out: Tensor, x: Tensor, weight: Tensor, rows: int) -> None:
        """out = silu(x @ gate.T) * (x @ up.T)."""
        gate, up = torch.mm(x[:rows], weight.t()).chunk(2, dim=1)
        torch.mul(functional.silu(gate), up, out=out[:rows])

    def rope_write(
        self, qkv: Tensor, io: StepIO, pools: Pools, cos: Tensor, sin: Tensor, layer: int, rows: int
    ) -> None:
        """Rotate q and k in place; store k and v in the rows' pages."""
        kv_heads, head_dim = pools.k.shape[4:]
        heads = qkv[:rows].view(rows, -1, head_dim)
        rotary = heads[:, :-kv_heads]
        pos = io.row_pos[:rows].long()
        low, high = rotary.chunk(2, dim=-1)
        turned = torch.cat((-high, low), dim=-1).mul_(sin[pos].unsqueeze(1))
        rotary.mul_(cos[pos].unsqueeze(1)).add_(turned)
        where = (io.row_page[:rows].long(), io.row_depth[:rows].long(), io.row_offset[:rows].long())
        pools.k.select(2, layer).index_put_(where, rotary[:, -kv_heads:])
        pools.v.select(2, layer).index_put_(where, heads[:, -kv_heads:])

    def attention(self, out: Tensor, qkv: Tensor, io: StepIO, pools: Pools, layer: int, rows: int) -> None:
        """Attend over the gathered prefix of each row, in blocks of rows that bound the memory gathered."""
        kv_heads, head_dim = pools.k.shape[4:]
        context = io.page_table.shape[1] * pools.page_size
        block = max(1, _GATHER_LIMIT // (context * kv_heads * head_dim))
        q_size = qkv.shape[1] - 2 * kv_heads * head_dim
        for start in range(0, rows, block):
            span = slice(start, min(start + block, rows))
            heads, future = _prefix(io, pools, layer, span, context)
            key, value = (pool.view(-1, head_dim).index_select(0, heads) for pool in (pools.k, pools.v))
            query = qkv[span, :q_size].reshape(-1, kv_heads, q_size // kv_heads // head_dim, head_dim)
            shape = (-1, kv_heads, context, head_dim)
            out[span].copy_(_attend(query, key.view(shape), value.view(shape), future))

    def scatter_gate(
        self, h: Tensor, io: StepIO, pools: Pools, gate_weight: Tensor, gate_bias: Tensor, rows: int
    ) -> None:
        """The gate is a float32 dot per row: its bits do not depend on the batch."""
        state = h[:rows]
        page, offset = io.row_page[:rows].long(), io.row_offset[:rows].long()
        pools.hidden.index_put_((page, offset), state)
        logit = (state.float() * gate_weight.float()).sum(dim=1) + gate_bias.float()
        pools.gate.index_put_((page, offset, io.row_depth[:rows].long()), logit.to(h.dtype).float())

    def coda_gather(self, out: Tensor, io: StepIO, pools: Pools, rows: int) -> None:
        """out = hidden rows of the coda positions."""
        slot, pos = io.coda_slot[:rows].long(), io.coda_pos[:rows].long()
        out[:rows].copy_(pools.hidden[pages_of(io, pools, slot, pos), pos % pools.page_size])


def _normalised(x: Tensor, eps: float) -> Tensor:
    """x / rms(x), computed in float32, in x's dtype. A new tensor."""
    wide = x.float()
    return (wide * wide.square().mean(dim=1, keepdim=True).add_(eps).rsqrt_()).to(x.dtype)


def _prefix(io: StepIO, pools: Pools, layer: int, span: slice, context: int) -> tuple[Tensor, Tensor]:
    """Where the prefixes of some rows lie, and which of ``context`` positions are beyond them.

    Returns indices ``[R * kv_heads * context]`` of head vectors in a pool, and the mask ``future [R, context]``.
    Positions beyond a row's own are replaced by its own, so that storage it may not see is not even read.
    """
    _, depths, layers, page_size, kv_heads, _ = pools.k.shape
    pos = io.row_pos[span].long().unsqueeze(1)
    place = torch.arange(context, device=pos.device)
    seen = torch.minimum(place, pos)
    page = pages_of(io, pools, io.row_slot[span].long().unsqueeze(1), seen)
    plane = (page * depths + io.row_depth[span].unsqueeze(1)) * layers + layer
    token = plane * page_size + seen % page_size
    heads = token.unsqueeze(1) * kv_heads + torch.arange(kv_heads, device=pos.device).unsqueeze(1)
    return heads.flatten(), place > pos


def _attend(query: Tensor, key: Tensor, value: Tensor, future: Tensor) -> Tensor:
    """Attention of ``query [R, kv_heads, group, d]`` over ``key, value [R, kv_heads, C, d]`` -> ``[R, heads d]``.

    Scores where ``future [R, C]`` is True become -inf, and their probabilities exactly zero.
    """
    scores = torch.matmul(query, key.transpose(2, 3)).mul_(query.shape[3] ** -0.5)
    scores.masked_fill_(future[:, None, None, :], -torch.inf)
    probabilities = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    return torch.matmul(probabilities, value).flatten(1)
