"""A matrix product whose rows do not depend on their number."""

import triton.language as tl

from wavegraph.model.ops.triton.kernels.jit import kernel


@kernel
def gemm(
    out_ptr, x_ptr, weight_ptr, rows,
    OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """out [rows, OUTPUTS] = x [rows, INPUTS] @ weight [OUTPUTS, INPUTS].T, summed in float32 over INPUTS in order.

    Tiles are the same for every number of rows and INPUTS is never split, so a row has the same bits in any batch.
    Program (i, j) computes BLOCK_N outputs i of BLOCK_M rows j: programs that share weights are neighbours.
    """
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    output = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    column = tl.arange(0, BLOCK_K)
    x = x_ptr + row[:, None] * INPUTS + column[None, :]
    weight = weight_ptr + output[None, :] * INPUTS + column[:, None]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in tl.range(0, INPUTS, BLOCK_K):
        inside = column < INPUTS - start
        a = tl.load(x + start, mask=(row < rows)[:, None] & inside[None, :], other=0.0)
        b = tl.load(weight + start, mask=(output < OUTPUTS)[None, :] & inside[:, None], other=0.0)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    to = out_ptr + row[:, None] * OUTPUTS + output[None, :]
    tl.store(to, acc.to(out_ptr.dtype.element_ty), mask=(row < rows)[:, None] & (output < OUTPUTS)[None, :])
