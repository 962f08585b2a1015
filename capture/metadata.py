"""What crosses to the device for one step: one packed int32 buffer, one copy. No torch here.

`StepLayout` knows where each field lies; it packs plain lists into a NumPy array that backs (or is copied
into) the device's buffer. Every pack starts from a template in which all entries point at scratch, so that no
entry of an earlier, larger step survives. `StepBounds` then looks over the packed values before they are
sent: operators index memory with them.

Updates of the device's tables that do not fit into one buffer go ahead in buffers that hold nothing else.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from wavegraph.errors import CaptureError
from wavegraph.model.sampling import (
    MAX_LOGIT_BIAS,
    MAX_STOP_IDS,
    MAX_TOP_LOGPROBS,
    PARAMS_WIDTH,
    Action,
    Column,
    encode_params,
)

HEADER_FIELDS = ("spans", "rows", "coda", "tokens", "pages", "params")
HEADER_SIZE = 8
PARAM_UPDATES = 8
"""Requests whose parameters fit into one packed buffer."""

FEATURE_COPY_KV = 1 << 30
"""Bit of ``StepInputs.coda_features``: rows that leave early want their KV copied into the deeper planes."""

_NAMES = {
    "span": ("span_slot", "span_start", "span_count", "span_depth"),
    "coda": ("coda_slot", "coda_pos", "coda_depth", "coda_action"),
    "token": ("token_slot", "token_pos", "token_id"),
    "page": ("page_slot", "page_index", "page_id"),
    "param": ("param_slot", "param_row"),
}
# Groups of parallel lists in the order of the header's counts, and what fetches a group from a step.
_PARALLEL = tuple((group, names, attrgetter(*names)) for group, names in _NAMES.items())
_INT_MAX = 2**31 - 1
_ITEM = struct.calcsize("i")


class StepInputs(Protocol):
    """One step as plain lists of ints; a scheduler's plan satisfies it. It must not change once submitted.

    Spans are ``(slot, start, count, depth)``; token updates ``(slot, position, token id)``; page updates
    ``(slot, page index, page id)``; parameter updates ``(slot, row)``, an empty row meaning the default one; coda
    rows ``(slot, position, depth, action)``. Each is held as parallel lists. ``coda_features`` says what CODA must
    be able to do. ``swap_out``, ``swap_in`` (key, pages) and ``swap_drop`` (key) run before all else, in this order.
    """

    rows: int
    bucket: int
    span_slot: list[int]
    span_start: list[int]
    span_count: list[int]
    span_depth: list[int]
    token_slot: list[int]
    token_pos: list[int]
    token_id: list[int]
    page_slot: list[int]
    page_index: list[int]
    page_id: list[int]
    param_slot: list[int]
    param_row: list[Sequence[int]]
    coda_slot: list[int]
    coda_pos: list[int]
    coda_depth: list[int]
    coda_action: list[int]
    coda_bucket: int
    coda_features: int
    swap_out: list[tuple[int, list[int]]]
    swap_in: list[tuple[int, list[int]]]
    swap_drop: list[int]


DEFAULT_PARAMS = encode_params()
"""Parameters of a request that brings none: greedy, through all depths."""


@dataclass(frozen=True)
class StepLayout:
    """Offsets of the packed buffer, from the engine's limits.

    ``max_rows`` is the largest core bucket, ``max_coda_rows`` the largest coda bucket, ``max_spans`` the most
    spans of a step, ``scratch_slot`` and ``scratch_page`` the ids no request can own.
    """

    max_rows: int
    max_coda_rows: int
    max_spans: int
    scratch_slot: int
    scratch_page: int
    offsets: dict[str, tuple[int, int]] = field(init=False, repr=False, compare=False)
    size: int = field(init=False, repr=False, compare=False)
    template: NDArray[np.int32] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        spans, rows, coda = self.max_spans, self.max_rows, self.max_coda_rows
        scratch, page = self.scratch_slot, self.scratch_page
        sections: list[tuple[str, int, int | Sequence[int]]] = [("header", HEADER_SIZE, 0)]
        sections += [("span_slot", spans, scratch), ("span_start", spans, 0)]
        sections += [("span_count", spans, 0), ("span_depth", spans, 0)]
        sections += [("token_slot", rows, scratch), ("token_pos", rows, 0), ("token_id", rows, 0)]
        sections += [("page_slot", rows, scratch), ("page_index", rows, 0), ("page_id", rows, page)]
        sections += [("param_slot", PARAM_UPDATES, scratch)]
        sections += [("param_rows", PARAM_UPDATES * PARAMS_WIDTH, DEFAULT_PARAMS * PARAM_UPDATES)]
        sections += [("coda_slot", coda, scratch), ("coda_pos", coda, 0)]
        sections += [("coda_depth", coda, 0), ("coda_action", coda, Action.SCORE)]
        offsets: dict[str, tuple[int, int]] = {}
        parts = []
        at = 0
        for name, length, fill in sections:
            offsets[name] = (at, at + length)
            parts.append(np.full(length, fill, dtype=np.int32))
            at += length
        object.__setattr__(self, "offsets", offsets)
        object.__setattr__(self, "size", at)
        object.__setattr__(self, "template", np.concatenate(parts))

    def parts(self, step: StepInputs) -> int:
        """How many buffers a step takes: one, and one more for each that its table updates fill ahead of it."""
        rows = self.max_rows
        tokens, pages, params = len(step.token_slot), len(step.page_slot), len(step.param_slot)
        if tokens <= rows and pages <= rows and params <= PARAM_UPDATES:
            return 1
        return max(-(-tokens // rows), -(-pages // rows), -(-params // PARAM_UPDATES))

    def pack(self, step: StepInputs, out: NDArray[np.int32], part: int = 0, parts: int = 1) -> None:
        """Write buffer ``part`` of ``parts`` of ``step`` into ``out [size]`` int32.

        Each holds a part of the table updates, in their order; the last one holds also the step's rows.
        Raises `CaptureError` if a field exceeds its section, parallel lists differ in length, or a value is
        not a 32-bit integer; ``out`` then holds no usable step.
        """
        out[:] = self.template
        counts: list[int] = []
        for group, names, fetch in _PARALLEL:
            lists = fetch(step)
            total = len(lists[0])
            for name, values in zip(names, lists, strict=True):
                if len(values) != total:
                    raise CaptureError(
                        f"{name}: {len(values)} entries beside {total} of {names[0]}; make them parallel"
                    )
            if parts > 1:
                window = self._window(group, part, parts)
                lists = tuple(values[window] for values in lists)
            counts.append(len(lists[0]))
            if lists[0]:
                for name, values in zip(names, lists, strict=True):
                    self._write(name, values, out)
        rows = step.rows if part == parts - 1 else 0
        out[:6] = (counts[0], rows, *counts[1:])

    def _window(self, group: str, part: int, parts: int) -> slice:
        """What a part holds of a group of parallel lists."""
        if group in ("span", "coda"):
            return slice(None) if part == parts - 1 else slice(0)
        room = PARAM_UPDATES if group == "param" else self.max_rows
        return slice(part * room, (part + 1) * room)

    def _write(self, name: str, values: Sequence[Any], out: NDArray[np.int32]) -> None:
        if name == "param_row":
            for index, row in enumerate(values):
                self._write_params(index, row, out)
            return
        start, stop = self.offsets[name]
        count = len(values)
        if count > stop - start:
            raise CaptureError(f"{name}: {count} entries exceed the {stop - start} of this layout; plan a smaller step")
        try:
            # Three times as fast as assigning the list to a slice.
            struct.pack_into(f"{count}i", out.data, start * _ITEM, *values)
        except struct.error as error:
            raise CaptureError(f"{name}: a value is not a 32-bit integer ({error})") from None

    def _write_params(self, index: int, row: Sequence[int], out: NDArray[np.int32]) -> None:
        if not row:
            return  # the template holds the default row
        if len(row) != PARAMS_WIDTH:
            raise CaptureError(
                f"param_row[{index}]: has {len(row)} entries, not {PARAMS_WIDTH}; make it with encode_params"
            )
        at = self.offsets["param_rows"][0] + index * PARAMS_WIDTH
        try:
            struct.pack_into(f"{PARAMS_WIDTH}i", out.data, at * _ITEM, *row)
        except struct.error as error:
            raise CaptureError(f"param_row[{index}]: a value is not a 32-bit integer ({error})") from None


class StepBounds:
    """The range of every packed entry, checked for a whole step in a few vector operations.

    Operators index memory with these values, so a sentinel such as -1, or an id beyond a table, must not
    reach them. ``max_model_len`` is in positions, ``depths`` is D, ``pages_per_request`` the width of the
    page table.
    """

    def __init__(
        self, layout: StepLayout, *, max_model_len: int, pages_per_request: int, depths: int, vocab_size: int
    ) -> None:
        self._layout = layout
        self._max_model_len = max_model_len
        slot, page = layout.scratch_slot, layout.scratch_page
        limits = {
            "header": _INT_MAX,
            "span_slot": slot,
            "span_start": max_model_len - 1,
            "span_count": layout.max_rows,
            "span_depth": depths - 1,
            "token_slot": slot,
            "token_pos": max_model_len,
            "token_id": vocab_size - 1,
            "page_slot": slot,
            "page_index": pages_per_request - 1,
            "page_id": page,
            "param_slot": slot,
            "coda_slot": slot,
            "coda_pos": max_model_len - 1,
            "coda_depth": depths - 1,
            "coda_action": max(Action),
        }
        # As unsigned numbers, negative ones are beyond every limit: one comparison for both ends.
        self._high = np.empty(layout.size, dtype=np.uint32)
        for name, limit in limits.items():
            self._high[slice(*layout.offsets[name])] = limit
        self._high[slice(*layout.offsets["param_rows"])] = np.tile(
            _param_limits(max_model_len, vocab_size), PARAM_UPDATES
        )
        self._start = slice(*layout.offsets["span_start"])
        self._count = slice(*layout.offsets["span_count"])

    def check(self, packed: NDArray[np.int32]) -> None:
        """Raise `CaptureError` for the first entry of ``packed [size]`` that no operator may see."""
        wrong = packed.view(np.uint32) > self._high
        if wrong.any():
            raise CaptureError(self._describe(int(wrong.argmax()), packed))
        counts = packed[self._count]
        spans, rows = int(packed[0]), int(packed[1])
        if int(counts.sum()) != rows:
            raise CaptureError(f"rows: {rows}, but the spans hold {int(counts.sum())}; plan and spans must agree")
        if spans and int(counts[:spans].min()) < 1:
            raise CaptureError(f"span_count[{int(counts[:spans].argmin())}]: 0 rows; leave empty spans out")
        ends = packed[self._start] + counts
        if int(ends.max()) > self._max_model_len:
            worst = int(ends.argmax())
            raise CaptureError(
                f"span {worst}: ends at position {int(ends[worst])}, beyond max_model_len "
                f"{self._max_model_len}; end the request there"
            )

    def _describe(self, at: int, packed: NDArray[np.int32]) -> str:
        for name, (start, stop) in self._layout.offsets.items():
            if start <= at < stop:
                index = str(at - start)
                if name == "param_rows":
                    index = f"{(at - start) // PARAMS_WIDTH}, column {(at - start) % PARAMS_WIDTH}"
                return f"{name}[{index}]: {int(packed[at])} is outside 0..{int(self._high[at])}"
        raise AssertionError(f"offset {at} lies in no section")


def _param_limits(max_model_len: int, vocab_size: int) -> NDArray[np.uint32]:
    """The largest value of each parameter. Seeds and floats may be any bits."""
    high = np.full(PARAMS_WIDTH, 2**32 - 1, dtype=np.uint32)
    high[Column.PROMPT_LEN] = max_model_len
    high[[Column.MIN_TOKENS, Column.TOP_K]] = _INT_MAX
    high[Column.TOP_LOGPROBS] = MAX_TOP_LOGPROBS
    high[Column.STOP_COUNT] = MAX_STOP_IDS
    high[Column.BIAS_COUNT] = MAX_LOGIT_BIAS
    high[Column.EXIT_COPY] = 1
    high[Column.STOP_IDS : Column.BIAS_VALUES] = vocab_size - 1
    return high
