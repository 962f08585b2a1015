"""CORE and CODA, written once in the calls of an operator set.

Layer order and norms follow the public reference (``modeling_ouro.py`` of ByteDance/Ouro-1.4B): four norms a
layer, and the final norm after *every* pass; the normed state is what the next pass, the gate and the
language head read.
"""

from wavegraph.model.io import Pools, StepIO, Workspace
from wavegraph.model.weights import Model


def core(model: Model, io: StepIO, pools: Pools, work: Workspace, rows: int) -> None:
    """One pass of the shared layers over ``rows`` rows, each of its own request, position and depth.

    Reads the step's inputs in ``io``, and stores its table updates first; writes KV, hidden rows and gate logits in
    ``pools``.
    """
    ops, weights, eps = model.ops, model.weights, model.config.rms_norm_eps
    layers = weights.layers
    next_norms = [layer.attn_norm for layer in layers[1:]] + [weights.norm]
    ops.update_tables(io)
    ops.prepare(io, pools, rows)
    ops.gather(work.x, io, pools, weights.embedding, rows)
    ops.norm(work.normed, work.x, layers[0].attn_norm, eps, rows)
    for index, (layer, next_norm) in enumerate(zip(layers, next_norms, strict=True)):
        ops.linear(work.qkv, work.normed, layer.qkv, rows)
        ops.rope_write(work.qkv, io, pools, model.rope.cos, model.rope.sin, index, rows)
        ops.attention(work.attn, work.qkv, io, pools, index, rows)
        ops.linear(work.branch, work.attn, layer.o, rows)
        ops.residual_norm(work.x, work.normed, work.branch, layer.attn_out_norm, layer.mlp_norm, eps, rows)
        ops.linear_silu_mul(work.mlp, work.normed, layer.gate_up, rows)
        ops.linear(work.branch, work.mlp, layer.down, rows)
        ops.residual_norm(work.x, work.normed, work.branch, layer.mlp_out_norm, next_norm, eps, rows)
    ops.scatter_gate(work.normed, io, pools, weights.gate_weight, weights.gate_bias, rows)


def tables(model: Model, io: StepIO) -> None:
    """The table updates of a step that has no rows, or more updates than fit beside its rows."""
    model.ops.update_tables(io)


def coda(model: Model, io: StepIO, pools: Pools, work: Workspace, rows: int) -> None:
    """Language head, exit decision and greedy draw for the ``rows`` hidden rows that ``io.coda_slot, coda_pos`` name.

    Writes ``io.logits [rows, V]``, ``coda_left``, ``coda_token [rows]`` and the token table.
    """
    _head(model, io, pools, work, rows)
    model.ops.draw_greedy(io, rows)


def coda_full(model: Model, io: StepIO, pools: Pools, work: Workspace, rows: int) -> None:
    """As `coda`, with each request's own sampling parameters; writes log-probabilities, ranks and top lists too."""
    _head(model, io, pools, work, rows)
    model.ops.draw(io, rows)
    model.ops.score(io, rows)


def copy_exits(model: Model, io: StepIO, pools: Pools, rows: int) -> None:
    """KV of exits under ``exit_kv="copy"``, after `coda` or `coda_full` of the same rows."""
    model.ops.copy_exits(io, pools, rows)


def _head(model: Model, io: StepIO, pools: Pools, work: Workspace, rows: int) -> None:
    ops = model.ops
    ops.coda_gather(work.coda_x, io, pools, rows)
    ops.linear(io.logits, work.coda_x, model.weights.lm_head, rows)
    ops.leave(io, pools, rows)
