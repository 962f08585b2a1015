"""The operator set: everything CORE and CODA do, as about a dozen calls over static tensors.

CORE is written once, in these calls; an implementation (ATen, C++, Triton) supplies them. Contract of all:

- Only the first ``rows`` rows of each ``[B, …]`` or ``[C, …]`` tensor are touched; outputs never alias inputs
  unless said. Shapes depend on ``rows`` alone, never on data; nothing syncs with the host.
- Padding rows may compute anything, NaN included, but read and write only scratch storage and their own rows.
- A value that a mask excludes never reaches a result, not even as ``0 * NaN``: recycled pages are not cleaned.
- Offsets into pools are 64-bit.
- Norms follow the reference: RMS statistics in float32, cast to the model dtype, then times the weight.
"""

from typing import Protocol

from torch import Tensor

from wavegraph.model.io import Pools, StepIO, Workspace


class Ops(Protocol):
    """One implementation of the operators. ``layer`` is 0-based; ``eps`` the config's ``rms_norm_eps``."""

    name: str
    dense_attention: bool
    """Whether each row of `attention` costs as much as the longest context would."""

    def pack_linear(self, weight: Tensor) -> Tensor:
        """Bring a linear weight ``[out, in]`` into the layout `linear` wants (once, after loading)."""
        ...

    def pack_gate_up(self, weight: Tensor) -> Tensor:
        """Bring the stacked gate and up weights ``[2 I, H]`` into the layout `linear_silu_mul` wants."""
        ...

    def scratch_size(self, io: StepIO, pools: Pools, work: Workspace) -> int:
        """How many words of int32 ``io.scratch`` must hold; asked once, before any other call on these tensors."""
        ...

    def update_tables(self, io: StepIO) -> None:
        """Store the step's token, page and parameter updates in the device tables."""
        ...

    def prepare(self, io: StepIO, pools: Pools, rows: int) -> None:
        """Expand spans to the row fields."""
        ...

    def gather(self, out: Tensor, io: StepIO, pools: Pools, embedding: Tensor, rows: int) -> None:
        """PRELUDE or retained state: ``embedding[token]`` for rows at depth 0, else the hidden row. out [B, H]."""
        ...

    def norm(self, out: Tensor, x: Tensor, weight: Tensor, eps: float, rows: int) -> None:
        """out = rmsnorm(x) * weight."""
        ...

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
        """x += rmsnorm(branch) * branch_weight, in place; then out = rmsnorm(x) * next_weight."""
        ...

    def linear(self, out: Tensor, x: Tensor, weight: Tensor, rows: int) -> None:
        """out = x @ weight.T, weight as packed by `pack_linear`."""
        ...

    def linear_silu_mul(self, out: Tensor, x: Tensor, weight: Tensor, rows: int) -> None:
        """out = silu(x @ gate.T) * (x @ up.T), weight as packed by `pack_gate_up`. out [B, I]."""
        ...

    def rope_write(
        self, qkv: Tensor, io: StepIO, pools: Pools, cos: Tensor, sin: Tensor, layer: int, rows: int
    ) -> None:
        """Rotate the q and k parts of each row in place; store its k and v in its page, depth, layer, offset.

        ``cos, sin [max_position, head_dim]`` in the model dtype; halves are paired as (i, i + d/2).
        """
        ...

    def attention(self, out: Tensor, qkv: Tensor, io: StepIO, pools: Pools, layer: int, rows: int) -> None:
        """Causal attention of each row over positions ``0..row_pos`` of its own plane, softmax in float32."""
        ...

    def scatter_gate(
        self, h: Tensor, io: StepIO, pools: Pools, gate_weight: Tensor, gate_bias: Tensor, rows: int
    ) -> None:
        """Store each row of ``h [B, H]`` in the hidden pool, and its gate logit at its depth in the gate pool.

        logit = h . gate_weight + gate_bias, rounded to the model dtype. gate_weight [H], gate_bias [1].
        """
        ...

    def coda_gather(self, out: Tensor, io: StepIO, pools: Pools, rows: int) -> None:
        """out [C, H] = hidden row of (coda_slot, coda_pos)."""
        ...

    def leave(self, io: StepIO, pools: Pools, rows: int) -> None:
        """coda_left = 1 for ``SAMPLE`` rows and for ``GATE`` rows that the exit rule lets go, else 0.

        The rule, in float32, over the position's gate logits of depths ``0..coda_depth``: the chance to leave at
        depth j is ``lam_j * prod(1 - lam_i for i < j)``, lam the sigmoid; a row leaves if the sum of these reaches
        its request's ``EXIT_THRESHOLD``. At the last depth it always leaves. Gates of deeper depths are not read.
        """
        ...

    def draw_greedy(self, io: StepIO, rows: int) -> None:
        """Rows with coda_left: coda_token = argmax(logits), first index on ties, and token_table[pos + 1] = it.

        Others: coda_token = -1; what they store goes to the scratch request.
        """
        ...

    def draw(self, io: StepIO, rows: int) -> None:
        """As `draw_greedy`, by each request's own parameters; `wavegraph.model.sampling` defines the order."""
        ...

    def score(self, io: StepIO, rows: int) -> None:
        """coda_logprob, coda_rank, top_ids, top_logprobs, from raw logits in float32. Runs after `draw`."""
        ...

    def copy_exits(self, io: StepIO, pools: Pools, rows: int) -> None:
        """Copy K and V of plane coda_depth, all layers, into all deeper planes of the same position.

        Only for rows with coda_left or of action ``REPLAY``, whose request has ``EXIT_COPY``. All else writes scratch.
        """
        ...
