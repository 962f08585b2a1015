"""Which Triton kernels an engine's programs launch, found by running the programs themselves.

Every tensor lies on torch's meta device: it has a shape, a dtype and no memory, so a model of any size is recorded on
any machine, with neither Triton nor a GPU. What is found is what `wavegraph.model.ops.triton.compile` has to compile.
"""

from dataclasses import replace

import torch
from torch import Tensor

from wavegraph.buckets.ladder import Ladder
from wavegraph.capture.buffers import Limits, build_pools, build_step_buffers, build_workspace
from wavegraph.capture.programs import Programs
from wavegraph.model.config import OuroConfig
from wavegraph.model.ops.triton.launch import KernelSpec, Recorder
from wavegraph.model.ops.triton.ops import TritonOps
from wavegraph.model.weights import build_model


def kernel_specs(
    config: OuroConfig,
    dtype: torch.dtype,
    limits: Limits,
    ladder: Ladder,
    coda_ladder: Ladder,
    *,
    deterministic: bool = False,
) -> tuple[KernelSpec, ...]:
    """All specs, each once, in the order of their first launch: every program at every bucket.

    ``limits`` and ladders are those of the engine to come; of its pages only ``page_size`` matters.
    """
    recorder = Recorder()
    ops = TritonOps(recorder, deterministic=deterministic)
    device = torch.device("meta")
    with torch.no_grad():
        model = build_model(
            config, _leave_empty, ops=ops, dtype=dtype, max_model_len=limits.max_model_len, device=device
        )
        pools = build_pools(config, limits, dtype, device)
        work = build_workspace(config, limits, dtype, device)
        io = build_step_buffers(config, limits, limits.layout(), dtype, device).io
        io = replace(io, scratch=torch.empty(ops.scratch_size(io, pools, work), dtype=torch.int32, device=device))
        for program in Programs(model, io, pools, work, ladder, coda_ladder).all:
            for bucket in program.ladder.sizes:
                program.run(bucket)
    return tuple(recorder.launches)


def _leave_empty(name: str, tensor: Tensor) -> None:
    """What a model without memory is filled with."""
