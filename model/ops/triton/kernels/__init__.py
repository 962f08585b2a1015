"""The kernels. Importing this package imports Triton; under ``TRITON_INTERPRET=1`` they run on CPU tensors.

Conventions, which `wavegraph.model.ops.triton.launch` relies on: a parameter ``*_ptr`` points to a tensor that starts
at a multiple of 16 bytes, ``*_tab`` to int32 (or float) words that may start anywhere, capitals are compile-time
constants, anything else is a number of the launch. All offsets into pools are 64-bit. A load that a mask excludes
gives zero, or minus infinity where that excludes it from a maximum.
"""

from typing import Any

from wavegraph.model.ops.triton.kernels import attention, exits, gemm, rows, sampling, steps

KERNELS: dict[str, Any] = {
    function.__name__: function
    for function in (
        steps.update_tables,
        steps.plan_tiles,
        steps.expand,
        rows.gather,
        rows.norm,
        rows.residual_norm,
        rows.rope_write,
        rows.silu_mul,
        rows.scatter_gate,
        rows.coda_gather,
        attention.attention,
        attention.merge_splits,
        gemm.gemm,
        exits.leave,
        exits.draw_greedy,
        exits.copy_exits,
        sampling.count_tokens,
        sampling.order_logits,
        sampling.weigh,
        sampling.pick,
        sampling.score,
    )
}
"""Every kernel by its name."""
