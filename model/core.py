"""CORE and CODA, written once in the calls of an operator set.

Layer order and norms follow the public reference (``modeling_ouro.py`` of ByteDance/Ouro-1.4B): four norms a
layer, and the final norm after *every* pass; the normed state is what the next pass, the gate and the
language head read.
"""

from wavegraph.model.io import Pools, StepIO, Workspace
from wavegraph.model.weights import Model


def core(model: Model, io: StepIO, pools: Pools, work: Workspace, rows: int) -> None:
    """One pass of the shared layers over ``rows`` rows, each of its own request, position and depth.

    Reads the step's inputs in ``io``; writes KV and hidden rows in ``pools`` and ``io.gate_logits [rows]``.
    """
    ops, weights, eps = model.ops, model.weights, model.config.rms_norm_eps
    layers = weights.layers
    next_norms = [layer.attn_norm for layer in layers[1:]] + [weights.norm]
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


def coda(model: Model, io: StepIO, pools: Pools, work: Workspace, rows: int) -> None:
    """Language head and sampling for the ``rows`` hidden rows that ``io.coda_slot, coda_pos`` name.

    Writes ``io.logits [rows, V]``, ``io.coda_token [rows]`` and the token table.
    """
    ops = model.ops
    ops.coda_gather(work.coda_x, io, pools, rows)
    ops.linear(io.logits, work.coda_x, model.weights.lm_head, rows)
    ops.sample(io, rows)
