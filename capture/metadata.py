"""What crosses to the device for one step: one packed int32 buffer, one copy. No torch here.

`StepLayout` knows where each field lies; it packs plain lists into a NumPy array that backs (or is copied
into) the device's buffer. Every pack starts from a template in which all entries point at scratch, so that no
entry of an earlier, larger step survives. `StepBounds` then looks over the packed values before they are
sent: operators index memory with them.
"""

import struct
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from wavegraph.errors import CaptureError

HEADER_FIELDS = ("spans", "rows", "coda", "tokens", "pages")
HEADER_SIZE = 8

_GROUPS = {
    "span": ("span_slot", "span_start", "span_count", "span_depth"),
    "token": ("token_slot", "token_pos", "token_id"),
    "page": ("page_slot", "page_index", "page_id"),
    "coda": ("coda_slot", "coda_pos"),
}
_ITEM = struct.calcsize("i")


class StepInputs(Protocol):
    """One step as plain lists of ints; a scheduler's plan satisfies it.

    Spans are ``(slot, start, count, depth)``; token updates ``(slot, position, token id)``; page updates
    ``(slot, page index, page id)``; coda rows ``(slot, position)``. Each is held as parallel lists.
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
    coda_slot: list[int]
    coda_pos: list[int]
    coda_bucket: int


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
        sections = [("header", HEADER_SIZE, 0)]
        spans, rows, coda = self.max_spans, self.max_rows, self.max_coda_rows
        scratch, page = self.scratch_slot, self.scratch_page
        sections += [("span_slot", spans, scratch), ("span_start", spans, 0)]
        sections += [("span_count", spans, 0), ("span_depth", spans, 0)]
        sections += [("token_slot", rows, scratch), ("token_pos", rows, 0), ("token_id", rows, 0)]
        sections += [("page_slot", rows, scratch), ("page_index", rows, 0), ("page_id", rows, page)]
        sections += [("coda_slot", coda, scratch), ("coda_pos", coda, 0)]
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

    def pack(self, step: StepInputs, out: NDArray[np.int32]) -> None:
        """Write ``step`` into ``out [size]`` int32.

        Raises `CaptureError` if a field exceeds its section, parallel lists differ in length, or a value is
        not a 32-bit integer; ``out`` then holds no usable step.
        """
        out[:] = self.template
        out[:5] = (
            len(step.span_slot),
            step.rows,
            len(step.coda_slot),
            len(step.token_slot),
            len(step.page_slot),
        )
        for names in _GROUPS.values():
            count = len(getattr(step, names[0]))
            for name in names:
                values = getattr(step, name)
                if len(values) != count:
                    raise CaptureError(
                        f"{name}: {len(values)} entries beside {count} of {names[0]}; make them parallel"
                    )
                if count:
                    self._write(name, values, out)

    def _write(self, name: str, values: list[int], out: NDArray[np.int32]) -> None:
        start, stop = self.offsets[name]
        count = len(values)
        if count > stop - start:
            raise CaptureError(f"{name}: {count} entries exceed the {stop - start} of this layout; plan a smaller step")
        try:
            # Three times as fast as assigning the list to a slice.
            struct.pack_into(f"{count}i", out.data, start * _ITEM, *values)
        except struct.error as error:
            raise CaptureError(f"{name}: a value is not a 32-bit integer ({error})") from None


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
            "coda_slot": slot,
            "coda_pos": max_model_len - 1,
        }
        self._high = np.full(layout.size, np.iinfo(np.int32).max, dtype=np.int32)
        for name, limit in limits.items():
            self._high[slice(*layout.offsets[name])] = limit
        self._start = slice(*layout.offsets["span_start"])
        self._count = slice(*layout.offsets["span_count"])

    def check(self, packed: NDArray[np.int32]) -> None:
        """Raise `CaptureError` for the first entry of ``packed [size]`` that no operator may see."""
        # As unsigned numbers, negative ones are beyond every limit: one comparison for both ends.
        wrong = packed.view(np.uint32) > self._high.view(np.uint32)
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
                return f"{name}[{at - start}]: {int(packed[at])} is outside 0..{int(self._high[at])}"
        raise AssertionError(f"offset {at} lies in no section")
