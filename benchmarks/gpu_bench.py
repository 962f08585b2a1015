"""What the figures of `gpu_check.py` are taken with: a model of Ouro-1.4B's shape, executors, and a clock.

Sections ask a `Bench` for everything that a GPU does differently, so that tests run them on a CPU at a tiny shape.
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from wavegraph.buckets.ladder import Ladder
from wavegraph.capture.backends.base import Backend
from wavegraph.capture.backends.cuda import CudaBackend
from wavegraph.capture.backends.eager import EagerBackend
from wavegraph.capture.buffers import Limits, build_pools, build_step_buffers, build_workspace
from wavegraph.capture.device import CudaDevice, Device
from wavegraph.capture.executor import Executor
from wavegraph.model.config import OuroConfig
from wavegraph.model.io import Pools, StepIO, Workspace
from wavegraph.model.ops.base import Ops
from wavegraph.model.weights import Model, build_model
from wavegraph.startup.backend_choice import make_runner
from wavegraph.study.measure import Times

OURO_1_4B = {
    "model_type": "ouro", "hidden_act": "silu", "vocab_size": 49152, "hidden_size": 2048, "intermediate_size": 5632,
    "num_hidden_layers": 24, "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 128,
    "total_ut_steps": 4, "rope_theta": 1e6, "rms_norm_eps": 1e-6, "max_position_embeddings": 65536,
    "tie_word_embeddings": False, "early_exit_threshold": 1.0, "eos_token_id": 0, "torch_dtype": "bfloat16",
}  # fmt: skip

WARM_UPS = 3
PAGE_SIZE = 16


@dataclass(frozen=True)
class Sizes:
    """How much is measured. The defaults are for an H200."""

    rows: tuple[int, ...] = (1, 4, 16, 64, 128, 256, 512, 1024)
    ladder: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 768, 1024)
    coda_rows: int = 64
    context: int = 512
    contexts: tuple[int, ...] = (512, 2048, 8192, 16384)
    decodes: int = 32
    chunk: int = 16
    chunks: tuple[int, ...] = (128, 64, 32, 16)
    budget: int = 1024
    requests: int = 4
    prompt_len: int = 8064
    tokens: int = 64
    repeats: int = 20
    copy_bytes: int = 2 << 30
    matrix: int = 8192


@dataclass
class Bench:
    """One device and one random model. ``make_graphs`` and ``make_eager`` give backends for it."""

    shape: OuroConfig
    dtype: torch.dtype
    device: Device
    ops: Ops
    make_graphs: Callable[[], Backend]
    make_eager: Callable[[], Backend]
    sizes: Sizes = field(default_factory=Sizes)

    @cached_property
    def model(self) -> Model:
        """Weights as they come from a normal distribution, made on the device."""
        device = self.device.target
        generator = torch.Generator(device).manual_seed(0)

        def fill(name: str, out: Tensor) -> None:
            if "norm" in name:
                out.fill_(1.0)
            else:
                out.normal_(std=0.5 * out.shape[-1] ** -0.5, generator=generator)

        return build_model(self.shape, fill, ops=self.ops, dtype=self.dtype, device=device)

    @property
    def layer_bytes(self) -> int:
        """Bytes of all that a pass of CORE must read at least: the layers' matrices."""
        layers = self.model.weights.layers
        return sum(weight.nbytes for layer in layers for weight in (layer.qkv, layer.o, layer.gate_up, layer.down))

    def limits(self, rows: int, coda_rows: int, *, slots: int, context: int) -> Limits:
        """Room for ``slots`` requests of ``context`` positions."""
        return Limits(
            max_num_seqs=slots,
            max_spans=min(rows, slots * self.shape.total_ut_steps),
            max_rows=rows,
            max_coda_rows=coda_rows,
            max_model_len=context,
            page_size=PAGE_SIZE,
            num_pages=slots * -(-context // PAGE_SIZE),
        )

    def executor(self, ladder: Sequence[int], coda: Sequence[int], *, slots: int, context: int) -> Executor:
        """An executor with room for ``slots`` requests of ``context`` positions, not captured yet."""
        limits = self.limits(max(ladder), max(coda), slots=slots, context=context)
        return Executor(self.model, limits, Ladder(ladder), Ladder(coda), self.make_graphs())

    def tensors(self, limits: Limits, *, layers: int) -> "Tensors":
        """What one pass of a model with so many layers and one depth works on, without the model."""
        shape, target = replace(self.shape, num_hidden_layers=layers, total_ut_steps=1), self.device.target
        with self.device.running():
            pools = build_pools(shape, limits, self.dtype, target)
            work = build_workspace(shape, limits, self.dtype, target)
            io = build_step_buffers(shape, limits, limits.layout(), self.dtype, target).io
            words = self.ops.scratch_size(io, pools, work)
            io = replace(io, scratch=torch.zeros(words, dtype=torch.int32, device=target))
        return Tensors(io, pools, work)

    def times(self, run: Callable[[], object], repeats: int | None = None) -> Times:
        """Milliseconds of one call on the device, between events; calls of a batch follow each other at once."""
        self.device.settle()  # inputs were made on another stream
        with torch.no_grad(), self.device.running():
            for _ in range(WARM_UPS):
                run()
            self.device.synchronize()
            return Times.of([self._milliseconds(run) for _ in range(repeats or self.sizes.repeats)])

    def _milliseconds(self, run: Callable[[], object]) -> float:
        if not isinstance(self.device, CudaDevice):
            start = time.perf_counter()
            run()
            return (time.perf_counter() - start) * 1e3
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end))

    def host_microseconds(self, run: Callable[[], object], repeats: int = 200) -> float:
        """Median host time of a call that finds the device idle."""
        spent = []
        self.device.settle()
        with torch.no_grad(), self.device.running():
            for _ in range(repeats):
                self.device.synchronize()
                start = time.perf_counter()
                run()
                spent.append(time.perf_counter() - start)
            self.device.synchronize()
        return statistics.median(spent) * 1e6

    def seconds(self, run: Callable[[], object]) -> float:
        """Wall time of one call and all that it submits."""
        self.device.synchronize()
        start = time.perf_counter()
        run()
        self.device.synchronize()
        return time.perf_counter() - start


def gpu_bench(sizes: Sizes | None = None) -> Bench:
    """The bench of the GPU that is here."""
    runner = make_runner("cuda", torch.bfloat16)
    device = runner.backend.device
    assert isinstance(device, CudaDevice)
    return Bench(
        shape=OuroConfig.from_dict(OURO_1_4B),
        dtype=torch.bfloat16,
        device=device,
        ops=runner.ops,
        make_graphs=lambda: CudaBackend(device),
        make_eager=lambda: EagerBackend(device),
        sizes=sizes if sizes is not None else Sizes(),
    )


@dataclass(frozen=True)
class Tensors:
    """A step's static tensors."""

    io: StepIO
    pools: Pools
    work: Workspace


def own_all_pages(io: StepIO, pools: Pools) -> None:
    """Random keys and values, and every slot the owner of pages that lie anywhere in the pool."""
    generator = torch.Generator().manual_seed(0)
    pages = io.page_table[:-1]
    order = torch.randperm(len(pools.hidden) - 1, generator=generator)[: math.prod(pages.shape)]
    pools.k.normal_()
    pools.v.normal_()
    pools.hidden.normal_()
    pages.copy_(order.view(pages.shape))


def set_spans(io: StepIO, rows: int, chunk: int, context: int, depth: int = 0) -> None:
    """``rows`` rows as chunks that end at ``context``, each of a slot of its own."""
    count = min(rows, chunk)
    slots = rows // count
    io.span_count.zero_()
    io.span_slot[:slots] = torch.arange(slots, dtype=torch.int32, device=io.span_slot.device)
    io.span_start[:slots] = context - count
    io.span_count[:slots] = count
    io.span_depth[:slots] = depth
