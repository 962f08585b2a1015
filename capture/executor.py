"""The executor: runs steps on static buffers. It knows slots, positions and pages, and never requests.

A step is one packed copy to the device, one replay of CORE if it has rows, one of CODA if some are due, in
that order: table updates (the first thing CORE does), rows, then coda rows, which may read what the same
step's rows wrote. Steps run in the order of their submission.

If `Executor.submit` raises `CaptureError`, nothing was launched: tables and pools are untouched, the host
slot is free again, and the next step may be submitted. If anything fails after the launch, `EngineError` is
raised and what the step's rows wrote is undefined; the executor then refuses all further work.
"""

from dataclasses import dataclass

import torch

from wavegraph.buckets.ladder import Ladder
from wavegraph.capture.backends.base import Backend
from wavegraph.capture.backends.registry import create_backend
from wavegraph.capture.buffers import (
    HostRing,
    HostSlot,
    Limits,
    build_pools,
    build_step_io,
    build_workspace,
    pool_bytes,
)
from wavegraph.capture.ladder import CapturedLadder, LadderStats, Progress
from wavegraph.capture.metadata import StepInputs
from wavegraph.capture.static import StaticSet
from wavegraph.errors import CaptureError, ConfigError, EngineError
from wavegraph.model.core import coda, core
from wavegraph.model.weights import Model


@dataclass(slots=True, eq=False)
class Ticket:
    """A submitted step. ``slot`` is its host memory, None once polled."""

    step: int
    coda_rows: int
    slot: HostSlot | None


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What the host sees of a step: the sampled token of each coda row, in order."""

    tokens: list[int]


@dataclass(frozen=True, slots=True)
class ExecutorStats:
    """Steps submitted, and how the two ladders were hit. The ladders' counts are live objects."""

    steps: int
    core: LadderStats
    coda: LadderStats


class Executor:
    """Static buffers of one model under ``limits``, and CORE and CODA recorded over them.

    ``backend`` is a name, or a backend of this executor's own. ``io``, ``pools`` and ``work`` may be read
    between steps. At most ``max_in_flight`` steps may be submitted and not polled. Raises `ConfigError` if limits,
    ladders and model do not agree.
    """

    def __init__(
        self,
        model: Model,
        limits: Limits,
        ladder: Ladder,
        coda_ladder: Ladder,
        backend: Backend | str,
        device: str | torch.device = "cpu",
        *,
        max_in_flight: int = 8,
    ) -> None:
        target = torch.device(device)
        _check_agreement(model, limits, ladder, coda_ladder, target)
        config, dtype = model.config, model.dtype
        self.limits = limits
        self.pool_bytes = pool_bytes(config, limits, dtype)
        self.pools = build_pools(config, limits, dtype, target)
        layout = limits.layout()
        self.io, self._packed = build_step_io(config, limits, layout, dtype, target)
        self.work = build_workspace(config, limits, dtype, target)
        io, pools, work = self.io, self.pools, self.work
        self.core = CapturedLadder("core", ladder, lambda rows: core(model, io, pools, work, rows))
        self.coda = CapturedLadder("coda", coda_ladder, lambda rows: coda(model, io, pools, work, rows))
        self._static = StaticSet.of(model=model, io=io, pools=pools, work=work)
        self._layout = layout
        self._bounds = limits.bounds(layout, config)
        self._ring = HostRing(max_in_flight, layout, pinned=target.type == "cuda")
        self._backend = create_backend(backend) if isinstance(backend, str) else backend
        self._steps = 0
        self._refusal = "nothing is captured yet; call capture() first"

    def capture(self, progress: Progress | None = None) -> None:
        """Record CORE, then CODA, at every bucket, and forbid all later captures by this backend.

        ``progress`` is called with the buckets done and in all. Raises `CaptureError` if a program cannot be
        recorded; then nothing is kept.
        """
        total = len(self.core.ladder.sizes) + len(self.coda.ladder.sizes)
        done = 0

        def advance() -> None:
            nonlocal done
            done += 1
            if progress is not None:
                progress(done, total)

        # The programs run once each while they are recorded: on an empty step, which touches only scratch.
        self._packed.copy_(torch.from_numpy(self._layout.template))
        try:
            self.core.capture(self._backend, self._static, advance)
            self.coda.capture(self._backend, self._static, advance)
        except CaptureError:
            self.core.release()
            raise
        self._backend.freeze()
        self._refusal = ""

    def submit(self, step: StepInputs) -> Ticket:
        """Launch one step. See the module's words for what holds when this raises."""
        if self._refusal:
            raise EngineError(f"executor: {self._refusal}")
        slot = self._ring.take()
        try:
            self._prepare(step, slot)
        except CaptureError:
            self._ring.give(slot)
            raise
        self._refusal = f"step {self._steps} failed after its launch; build a new executor"
        try:
            self._launch(step, slot)
        except (RuntimeError, IndexError) as error:
            raise EngineError(f"step {self._steps}: failed after its launch: {error}") from error
        self._refusal = ""
        self._steps += 1
        return Ticket(self._steps - 1, len(step.coda_slot), slot)

    def poll(self, ticket: Ticket) -> StepOutput:
        """Wait for a step and take its result, once. Tickets may be polled in any order."""
        slot = ticket.slot
        if slot is None:
            raise EngineError(f"step {ticket.step}: was polled before; keep its first result")
        ticket.slot = None
        tokens: list[int] = slot.tokens[: ticket.coda_rows].tolist()
        self._ring.give(slot)
        return StepOutput(tokens)

    def close(self) -> None:
        """Let go of all recordings. Nothing can be submitted afterwards; tickets may still be polled."""
        self._refusal = "closed"
        self.core.release()
        self.coda.release()

    @property
    def stats(self) -> ExecutorStats:
        """Counts since start-up."""
        return ExecutorStats(self._steps, self.core.stats, self.coda.stats)

    def _prepare(self, step: StepInputs, slot: HostSlot) -> None:
        """Pack the step and find everything that could be wrong with it. Raises `CaptureError`."""
        if step.rows:
            self.core.check(step.bucket, step.rows)
        elif step.token_slot or step.page_slot:
            raise CaptureError("step: has table updates but no rows; CORE applies updates, so send them with rows")
        elif not step.coda_slot:
            raise CaptureError("step: has neither rows nor coda rows; submit no empty step")
        if step.coda_slot:
            self.coda.check(step.coda_bucket, len(step.coda_slot))
        self._layout.pack(step, slot.staging_array)
        self._bounds.check(slot.staging_array)
        self._static.check()

    def _launch(self, step: StepInputs, slot: HostSlot) -> None:
        self._packed.copy_(slot.staging, non_blocking=True)
        if step.rows:
            self.core.replay(step.bucket, step.rows)
        if step.coda_slot:
            self.coda.replay(step.coda_bucket, len(step.coda_slot))
            slot.tokens.copy_(self.io.coda_token, non_blocking=True)


def _check_agreement(model: Model, limits: Limits, ladder: Ladder, coda_ladder: Ladder, device: torch.device) -> None:
    if device.type != "cpu":
        raise ConfigError(f"device: {device} has no executor yet; use cpu")
    if ladder.max != limits.max_rows:
        raise ConfigError(f"max_rows: {limits.max_rows} must be the largest core bucket, {ladder.max}")
    if coda_ladder.max != limits.max_coda_rows:
        raise ConfigError(f"max_coda_rows: {limits.max_coda_rows} must be the largest coda bucket, {coda_ladder.max}")
    if limits.max_model_len > model.max_model_len:
        raise ConfigError(
            f"max_model_len: {limits.max_model_len} exceeds the {model.max_model_len} positions of the model; "
            "lower it, or load the model for more"
        )
