"""What ``check=True`` looks at on every Nth step: canaries, baked addresses, and replays against eager runs.

A sampled replay is repeated eagerly, by the model's own code at the same bucket, and every live row's results must be
the same bits. No copy of the pools is needed: all that a step reads and overwrites are the hidden rows of CORE, which
are put back before the second run. CODA and its KV copy can be run twice as they are. So a sampled step takes twice as
long, and the memory of its rows' results for a while.
"""

import torch
from torch import Tensor

from wavegraph.capture.guards import Guards
from wavegraph.capture.ladder import CapturedLadder
from wavegraph.capture.programs import Programs
from wavegraph.capture.static import StaticSet
from wavegraph.errors import CaptureError
from wavegraph.model.io import Pools, StepIO
from wavegraph.model.weights import Model

AUDIT_EVERY = 8
"""Steps from one sampled step to the next; the first is one."""

_CODA_OUTPUTS = ("logits", "coda_left", "coda_token")
_FULL_OUTPUTS = ("coda_logprob", "coda_rank", "top_ids", "top_logprobs")


class Audit:
    """Replays that are looked at. ``guards`` allocated the tensors of ``static``."""

    def __init__(
        self, model: Model, io: StepIO, pools: Pools, programs: Programs, static: StaticSet, guards: Guards
    ) -> None:
        self._model, self._io, self._pools = model, io, pools
        self._programs, self._static, self._guards = programs, static, guards

    def core(self, bucket: int, rows: int) -> None:
        """Replay CORE, then run it. Raises `CaptureError` naming the first value that differs."""
        ops, io, pools = self._model.ops, self._io, self._pools
        with torch.no_grad():
            ops.update_tables(io)
            ops.prepare(io, pools, bucket)
        page, offset, depth = (field[:rows].long() for field in (io.row_page, io.row_offset, io.row_depth))
        before = pools.hidden[page, offset]

        def results() -> dict[str, Tensor]:
            planes = {name: getattr(pools, name)[page, depth, :, offset] for name in ("k", "v")}
            return planes | {"hidden": pools.hidden[page, offset], "gate": pools.gate[page, offset, depth]}

        program = self._programs.core
        program.replay(bucket, rows)
        replayed = results()
        pools.hidden[page, offset] = before
        program.run(bucket)
        self._compare(program, bucket, replayed, results())

    def coda(self, program: CapturedLadder, bucket: int, rows: int) -> None:
        """As `core`, for one of the programs over coda rows."""
        io, pools = self._io, self._pools
        names = _CODA_OUTPUTS + (_FULL_OUTPUTS if program is self._programs.coda_full else ())
        slot, pos = io.coda_slot[:rows].long(), io.coda_pos[:rows].long()
        page, offset = io.page_table[slot, pos // pools.page_size].long(), pos % pools.page_size

        def results() -> dict[str, Tensor]:
            if program is self._programs.copy_exits:
                return {name: getattr(pools, name)[page, :, :, offset] for name in ("k", "v")}
            return {name: getattr(io, name)[:rows].clone() for name in names}

        program.replay(bucket, rows)
        replayed = results()
        program.run(bucket)
        self._compare(program, bucket, replayed, results())

    def storage(self) -> None:
        """Raise `CaptureError` if a canary is dead, or a recording would touch other memory than when it was made."""
        self._guards.check(self._static)
        for program in self._programs.all:
            program.check_addresses()

    def _compare(
        self, program: CapturedLadder, bucket: int, replayed: dict[str, Tensor], run: dict[str, Tensor]
    ) -> None:
        for name, value in replayed.items():
            rows = (_bits(value) != _bits(run[name])).flatten(1).any(dim=1).nonzero().flatten().tolist()
            if rows:
                raise CaptureError(
                    f"{program.name}[{bucket}]: {name} of row {rows[0]} differs between the replay and an eager run"
                )


def _bits(value: Tensor) -> Tensor:
    """A row of bytes for each row, so that NaN equals itself."""
    return value.reshape(value.shape[0], -1).contiguous().view(torch.uint8)
