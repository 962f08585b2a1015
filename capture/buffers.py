"""Everything that recorded programs read and write, allocated once from the engine's limits.

Slot ``max_num_seqs`` and page ``num_pages`` are scratch: no request can own them, and padding reads and
writes nothing else.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from wavegraph.capture.metadata import DEFAULT_PARAMS, StepBounds, StepLayout
from wavegraph.capture.ring import result_sections
from wavegraph.errors import ConfigError
from wavegraph.model.config import OuroConfig
from wavegraph.model.io import Pools, StepIO, Workspace
from wavegraph.model.sampling import PARAMS_WIDTH


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What bounds a step and the whole engine. All at least 1; `ConfigError` names the one that is not.

    ``max_rows`` and ``max_coda_rows`` are the largest core and coda buckets, ``max_spans`` the most spans of
    a step, ``page_size`` positions a page, ``num_pages`` the pages requests can own (one more is allocated).
    """

    max_num_seqs: int
    max_spans: int
    max_rows: int
    max_coda_rows: int
    max_model_len: int
    page_size: int
    num_pages: int

    def __post_init__(self) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            if not 1 <= value < 2**31 - 1:
                raise ConfigError(f"{entry.name}: must be in 1..2147483646 (tables are int32), got {value}")

    @property
    def scratch_slot(self) -> int:
        """The request slot of padding."""
        return self.max_num_seqs

    @property
    def scratch_page(self) -> int:
        """The page of padding, and of every page table entry not set."""
        return self.num_pages

    @property
    def pages_per_request(self) -> int:
        """Width of the page table."""
        return -(-self.max_model_len // self.page_size)

    def layout(self) -> StepLayout:
        """Where each input of a step lies in the packed buffer."""
        return StepLayout(
            max_rows=self.max_rows,
            max_coda_rows=self.max_coda_rows,
            max_spans=self.max_spans,
            scratch_slot=self.scratch_slot,
            scratch_page=self.scratch_page,
        )

    def bounds(self, layout: StepLayout, config: OuroConfig) -> StepBounds:
        """The values a step's inputs may have."""
        return StepBounds(
            layout,
            max_model_len=self.max_model_len,
            pages_per_request=self.pages_per_request,
            depths=config.total_ut_steps,
            vocab_size=config.vocab_size,
        )


def page_bytes(config: OuroConfig, page_size: int, dtype: torch.dtype) -> int:
    """Bytes of one page: K and V of all layers and depths, hidden rows and gates, of ``page_size`` positions."""
    planes = config.num_hidden_layers * config.total_ut_steps
    features = 2 * planes * config.kv_size + config.hidden_size
    return page_size * (features * dtype.itemsize + config.total_ut_steps * torch.float32.itemsize)


def pool_bytes(config: OuroConfig, limits: Limits, dtype: torch.dtype) -> int:
    """Bytes of all pools, the scratch page included."""
    return (limits.num_pages + 1) * page_bytes(config, limits.page_size, dtype)


MakeZeros = Callable[..., Tensor]
"""Called as `torch.zeros` is: ``make(size, dtype=..., device=...)``."""


def build_pools(
    config: OuroConfig, limits: Limits, dtype: torch.dtype, device: torch.device, make: MakeZeros = torch.zeros
) -> Pools:
    """Pools, zeroed: on Linux that costs no memory until a page is used."""
    pages, size = limits.num_pages + 1, limits.page_size
    planes = (pages, config.total_ut_steps, config.num_hidden_layers, size)
    kv_shape = (*planes, config.num_key_value_heads, config.head_dim)
    return Pools(
        k=make(kv_shape, dtype=dtype, device=device),
        v=make(kv_shape, dtype=dtype, device=device),
        hidden=make((pages, size, config.hidden_size), dtype=dtype, device=device),
        gate=make((pages, size, config.total_ut_steps), dtype=torch.float32, device=device),
    )


def build_workspace(
    config: OuroConfig, limits: Limits, dtype: torch.dtype, device: torch.device, make: MakeZeros = torch.zeros
) -> Workspace:
    """Intermediates of the largest buckets."""

    def rows(count: int, features: int) -> Tensor:
        return make((count, features), dtype=dtype, device=device)

    return Workspace(
        x=rows(limits.max_rows, config.hidden_size),
        normed=rows(limits.max_rows, config.hidden_size),
        branch=rows(limits.max_rows, config.hidden_size),
        qkv=rows(limits.max_rows, config.q_size + 2 * config.kv_size),
        attn=rows(limits.max_rows, config.q_size),
        mlp=rows(limits.max_rows, config.intermediate_size),
        coda_x=rows(limits.max_coda_rows, config.hidden_size),
    )


@dataclass(frozen=True, slots=True)
class StepBuffers:
    """The step's tensors, and the two int32 buffers behind those that cross to and from the host.

    ``packed [layout.size]`` lies behind the inputs, ``results [results.size]`` behind the outputs that the host
    may want, the tokens first.
    """

    io: StepIO
    packed: Tensor
    results: Tensor


def build_step_buffers(
    config: OuroConfig,
    limits: Limits,
    layout: StepLayout,
    dtype: torch.dtype,
    device: torch.device,
    make: MakeZeros = torch.zeros,
) -> StepBuffers:
    """A step's inputs, tables and outputs.

    The inputs hold an empty step; every page table entry is the scratch page, all parameters are the default.
    """

    def ints(*shape: int) -> Tensor:
        return make(shape, dtype=torch.int32, device=device)

    packed = ints(layout.size).copy_(torch.from_numpy(layout.template))
    inputs = {name: packed[start:stop] for name, (start, stop) in layout.offsets.items()}
    inputs["param_rows"] = inputs["param_rows"].view(-1, PARAMS_WIDTH)
    sections = result_sections(limits.max_coda_rows, config.vocab_size)
    results = ints(sum(section.size for section in sections))
    slots, rows, coda = limits.max_num_seqs + 1, limits.max_rows, limits.max_coda_rows
    io = StepIO(
        **inputs,
        token_table=ints(slots, limits.max_model_len + 1),
        page_table=ints(slots, limits.pages_per_request).fill_(limits.scratch_page),
        params=ints(slots, PARAMS_WIDTH).copy_(torch.tensor(DEFAULT_PARAMS, dtype=torch.int32)),
        row_slot=ints(rows).fill_(limits.scratch_slot),
        row_pos=ints(rows),
        row_depth=ints(rows),
        row_page=ints(rows).fill_(limits.scratch_page),
        row_offset=ints(rows),
        logits=make((coda, config.vocab_size), dtype=dtype, device=device),
        coda_left=ints(coda),
        **{section.name: section.view(results) for section in sections},
    )
    return StepBuffers(io, packed, results)
