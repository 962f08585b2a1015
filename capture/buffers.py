"""Everything that recorded programs read and write, allocated once from the engine's limits.

Slot ``max_num_seqs`` and page ``num_pages`` are scratch: no request can own them, and padding reads and
writes nothing else.
"""

from collections import deque
from dataclasses import dataclass, fields

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from wavegraph.capture.metadata import StepBounds, StepLayout
from wavegraph.errors import ConfigError, EngineError
from wavegraph.model.config import OuroConfig
from wavegraph.model.io import Pools, StepIO, Workspace


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
    """Bytes of one page: K and V of all layers and depths, and hidden rows, of ``page_size`` positions."""
    planes = config.num_hidden_layers * config.total_ut_steps
    return page_size * (2 * planes * config.kv_size + config.hidden_size) * dtype.itemsize


def pool_bytes(config: OuroConfig, limits: Limits, dtype: torch.dtype) -> int:
    """Bytes of all pools, the scratch page included."""
    return (limits.num_pages + 1) * page_bytes(config, limits.page_size, dtype)


def build_pools(config: OuroConfig, limits: Limits, dtype: torch.dtype, device: torch.device) -> Pools:
    """Pools, zeroed: on Linux that costs no memory until a page is used."""
    pages, size = limits.num_pages + 1, limits.page_size
    planes = (pages, config.total_ut_steps, config.num_hidden_layers, size)
    kv_shape = (*planes, config.num_key_value_heads, config.head_dim)
    return Pools(
        k=torch.zeros(kv_shape, dtype=dtype, device=device),
        v=torch.zeros(kv_shape, dtype=dtype, device=device),
        hidden=torch.zeros(pages, size, config.hidden_size, dtype=dtype, device=device),
    )


def build_workspace(config: OuroConfig, limits: Limits, dtype: torch.dtype, device: torch.device) -> Workspace:
    """Intermediates of the largest buckets."""

    def rows(count: int, features: int) -> Tensor:
        return torch.zeros(count, features, dtype=dtype, device=device)

    return Workspace(
        x=rows(limits.max_rows, config.hidden_size),
        normed=rows(limits.max_rows, config.hidden_size),
        branch=rows(limits.max_rows, config.hidden_size),
        qkv=rows(limits.max_rows, config.q_size + 2 * config.kv_size),
        attn=rows(limits.max_rows, config.q_size),
        mlp=rows(limits.max_rows, config.intermediate_size),
        coda_x=rows(limits.max_coda_rows, config.hidden_size),
    )


def build_step_io(
    config: OuroConfig, limits: Limits, layout: StepLayout, dtype: torch.dtype, device: torch.device
) -> tuple[StepIO, Tensor]:
    """A step's inputs, tables and outputs, and the packed int32 buffer ``[layout.size]`` behind the inputs.

    The inputs hold an empty step; every page table entry is the scratch page.
    """
    packed = torch.from_numpy(layout.template.copy()).to(device)
    inputs = {name: packed[start:stop] for name, (start, stop) in layout.offsets.items()}

    def ints(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=device)

    slots, rows, coda = limits.max_num_seqs + 1, limits.max_rows, limits.max_coda_rows
    io = StepIO(
        **inputs,
        token_table=ints(slots, limits.max_model_len + 1),
        page_table=ints(slots, limits.pages_per_request).fill_(limits.scratch_page),
        row_slot=ints(rows).fill_(limits.scratch_slot),
        row_pos=ints(rows),
        row_depth=ints(rows),
        row_page=ints(rows).fill_(limits.scratch_page),
        row_offset=ints(rows),
        gate_logits=torch.zeros(rows, dtype=torch.float32, device=device),
        logits=torch.zeros(coda, config.vocab_size, dtype=dtype, device=device),
        coda_token=ints(coda),
    )
    return io, packed


@dataclass(frozen=True, slots=True, eq=False)
class HostSlot:
    """Host memory of one step, int32: ``staging [layout.size]`` goes in, ``tokens [C]`` come out.

    ``staging_array`` is ``staging`` as NumPy sees it.
    """

    staging: Tensor
    staging_array: NDArray[np.int32]
    tokens: Tensor


class HostRing:
    """A few `HostSlot`, pinned when copies from them are asynchronous.

    A slot belongs to one step from `take` until `give`, and is never refilled between: no copy in flight can
    read the next step's values.
    """

    def __init__(self, count: int, layout: StepLayout, *, pinned: bool) -> None:
        self.count = count
        self._free: deque[HostSlot] = deque()
        for _ in range(count):
            staging = torch.zeros(layout.size, dtype=torch.int32, pin_memory=pinned)
            tokens = torch.zeros(layout.max_coda_rows, dtype=torch.int32, pin_memory=pinned)
            self._free.append(HostSlot(staging, staging.numpy(), tokens))

    @property
    def in_flight(self) -> int:
        """Slots taken and not given back."""
        return self.count - len(self._free)

    def take(self) -> HostSlot:
        """The slot that has been free longest. Raises `EngineError` if all are in flight."""
        if not self._free:
            raise EngineError(f"steps in flight: {self.count} of {self.count} submitted and not polled; poll one first")
        return self._free.popleft()

    def give(self, slot: HostSlot) -> None:
        """Return a slot whose step is done."""
        self._free.append(slot)
