"""The executor: runs steps on static buffers. It knows slots, positions and pages, and never requests.

A step is one packed copy to the device, one replay of CORE if it has rows, and one of CODA if some are due (and of
its KV copy, if asked for), in this order: pages that move between host and pools, table updates (the first thing
CORE does), rows, then coda rows, which may read what the same step's rows wrote. Table updates beyond one packed
buffer go ahead through the program `tables`, which also applies those of a step without rows. Steps run in the
order of their submission.

If `Executor.submit` raises `CaptureError`, nothing was launched: tables and pools are untouched, the host
slot is free again, and the next step may be submitted. If anything fails after the launch, `EngineError` is
raised and what the step's rows wrote is undefined; the executor then refuses all further work. An asynchronous
executor, or one on a GPU, raises it from the next `poll` of that step or a later one, or the next `submit`.
"""

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import Literal, overload

import torch
from torch import Tensor

from wavegraph.buckets.ladder import Ladder
from wavegraph.capture.audit import AUDIT_EVERY, Audit
from wavegraph.capture.backends.base import Backend
from wavegraph.capture.backends.registry import create_backend
from wavegraph.capture.buffers import Limits, MakeZeros, build_pools, build_step_buffers, build_workspace, pool_bytes
from wavegraph.capture.device import Device
from wavegraph.capture.guards import Guards
from wavegraph.capture.ladder import CapturedLadder, LadderStats, Progress
from wavegraph.capture.metadata import FEATURE_COPY_KV, StepInputs
from wavegraph.capture.programs import Programs
from wavegraph.capture.ring import HostRing, HostSlot, Logprobs
from wavegraph.capture.static import StaticSet
from wavegraph.capture.swap import PageStore, SwapStats
from wavegraph.errors import CaptureError, ConfigError, EngineError
from wavegraph.model.sampling import FEATURE_SAMPLER
from wavegraph.model.weights import Model

logger = logging.getLogger(__name__)

# What operators, copies and replays are known to raise.
_LAUNCH_ERRORS = (RuntimeError, IndexError, MemoryError, CaptureError)


@dataclass(slots=True, eq=False)
class Ticket:
    """A submitted step. ``slot`` is its host memory, None once polled; ``run`` its run on the worker thread, if any.

    ``full`` says that the step's coda rows ran the program that reports log-probabilities.
    """

    step: int
    coda_rows: int
    full: bool
    slot: HostSlot | None
    run: Future[None] | None = None


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What the host sees of a step: for each coda row, in order, the token drawn or -1, and its log-probabilities.

    ``logprobs`` is None for a step whose coda rows asked for the greedy program alone.
    """

    tokens: list[int]
    logprobs: Logprobs | None = None


@dataclass(frozen=True, slots=True)
class ExecutorStats:
    """Steps submitted, how the ladder of each program was hit, and what was swapped. The hits are live objects."""

    steps: int
    core: LadderStats
    coda: LadderStats
    coda_full: LadderStats
    copy_exits: LadderStats
    tables: LadderStats
    swap: SwapStats


class Executor:
    """Static buffers of one model under ``limits``, and CORE and CODA recorded over them.

    ``backend`` is a name, or a backend of this executor's own; its device, where the model must be, holds everything.
    At most ``max_in_flight`` steps may be submitted and not polled. ``asynchronous`` runs steps on one worker thread,
    unless the device queues them by itself, so that the host can plan the next one meanwhile; results are the same.
    ``check`` looks over every `AUDIT_EVERY`-th step as `wavegraph.capture.audit` says; what it
    finds ends the executor. ``io``, ``pools`` and ``work`` may be read between steps, after `synchronize`. One thread
    at a time may call. Raises `ConfigError` if limits, ladders and model do not agree.
    """

    def __init__(
        self,
        model: Model,
        limits: Limits,
        ladder: Ladder,
        coda_ladder: Ladder,
        backend: Backend | str,
        *,
        max_in_flight: int = 8,
        asynchronous: bool = False,
        check: bool = False,
    ) -> None:
        self._backend = create_backend(backend) if isinstance(backend, str) else backend
        self._device = self._backend.device
        _check_agreement(model, limits, ladder, coda_ladder, self._device)
        self.limits = limits
        self.pool_bytes = pool_bytes(model.config, limits, model.dtype)
        self._model = model
        self._layout = limits.layout()
        self._bounds = limits.bounds(self._layout, model.config)
        guards = Guards()
        with self._device.running():
            self._allocate(guards.zeros if check else torch.zeros)
        self._programs = Programs(model, self.io, self.pools, self.work, ladder, coda_ladder)
        self._static = StaticSet.of(model=model, io=self.io, pools=self.pools, work=self.work)
        self._audit = Audit(model, self.io, self.pools, self._programs, self._static, guards) if check else None
        self._ring = HostRing(max_in_flight, self._layout, model.config.vocab_size, self._device)
        self._store = PageStore(self.pools, self._device)
        own_thread = asynchronous and not self._device.queued
        self._worker = ThreadPoolExecutor(1, "wavegraph-executor") if own_thread else None
        self._newest: Future[None] | None = None
        self._steps = 0
        self._launched = 0
        self._refusal = "nothing is captured yet; call capture() first"
        self._failure = ""

    def _allocate(self, make: MakeZeros) -> None:
        config, dtype, target = self._model.config, self._model.dtype, self._device.target
        self.pools = build_pools(config, self.limits, dtype, target, make)
        buffers = build_step_buffers(config, self.limits, self._layout, dtype, target, make)
        self._packed, self._results = buffers.packed, buffers.results
        self.work = build_workspace(config, self.limits, dtype, target, make)
        words = self._model.ops.scratch_size(buffers.io, self.pools, self.work)
        self.io = replace(buffers.io, scratch=make((words,), dtype=torch.int32, device=target))

    def capture(self, progress: Progress | None = None) -> None:
        """Record every program at every bucket, and forbid all later captures by this backend.

        ``progress`` is called with the buckets done and in all. Raises `CaptureError` if a program cannot be
        recorded; then nothing is kept.
        """
        # The programs run while they are recorded: on an empty step, which touches only scratch.
        with self._device.running():
            self._packed.copy_(torch.from_numpy(self._layout.template))
        self._programs.capture(self._backend, self._static, progress)
        self._backend.freeze()
        self._refusal = ""

    # -- steps ---------------------------------------------------------------------------------------------

    def submit(self, step: StepInputs) -> Ticket:
        """Launch one step. See the module's words for what holds when this raises."""
        self._check_usable()
        slot = self._ring.take()
        try:
            parts = self._prepare(step, slot)
        except CaptureError:
            self._ring.give(slot)
            raise
        ticket = Ticket(self._steps, len(step.coda_slot), bool(step.coda_features & FEATURE_SAMPLER), slot)
        self._steps += 1
        if self._worker is None:
            self._run(ticket.step, step, slot, parts)
        else:
            threads = torch.get_num_threads()
            self._newest = ticket.run = self._worker.submit(self._run_there, threads, ticket.step, step, slot, parts)
        return ticket

    @overload
    def poll(self, ticket: Ticket) -> StepOutput: ...

    @overload
    def poll(self, ticket: Ticket, *, wait: Literal[True]) -> StepOutput: ...

    @overload
    def poll(self, ticket: Ticket, *, wait: bool) -> StepOutput | None: ...

    def poll(self, ticket: Ticket, *, wait: bool = True) -> StepOutput | None:
        """Wait for a step and take its result, once; None if it is not done and ``wait`` is False.

        Tickets may be polled in any order. Raises `EngineError` for a step that failed, or follows one that did.
        """
        slot = ticket.slot
        if slot is None:
            raise EngineError(f"step {ticket.step}: was polled before; keep its first result")
        if ticket.run is not None:
            if not wait and not ticket.run.done():
                return None
            ticket.run.result()
        elif not self._has_passed(ticket.step, slot, wait=wait):
            return None
        ticket.slot = None
        tokens: list[int] = slot.tokens[: ticket.coda_rows].tolist()
        logprobs = slot.logprobs(ticket.coda_rows) if ticket.full else None
        self._ring.give(slot)
        return StepOutput(tokens, logprobs)

    def synchronize(self) -> None:
        """Wait until all submitted steps have run. Raises `EngineError` if one failed."""
        if self._newest is not None:
            wait([self._newest])
        if self._failure:
            raise EngineError(f"executor: {self._failure}")
        try:
            self._device.synchronize()
        except RuntimeError as error:
            raise self._failed(self._steps - 1, error) from error

    def close(self) -> None:
        """Let submitted steps end, and let go of all recordings and of the worker thread.

        Nothing can be submitted afterwards; tickets may still be polled.
        """
        self._refusal = "closed"
        if self._worker is not None:
            self._worker.shutdown()
        self._programs.release()
        try:
            self._backend.release()
        except RuntimeError as error:  # of a device that failed before: what it held ends with the process
            logger.warning("close: the device gives nothing back (%s)", error)

    # -- between steps -------------------------------------------------------------------------------------

    def swap_out(self, key: int, pages: Sequence[int]) -> None:
        """Copy ``pages`` to host memory under ``key``, as `StepInputs.swap_out` does, after all submitted steps.

        Raises `CaptureError`, changing nothing, for a key in use or a page that is not one.
        """
        self._check_usable()
        self.synchronize()
        self._store.accept([(key, pages)], (), ())
        with self._device.running():
            self._store.run([(key, pages)], (), ())

    def take_swapped(self, key: int) -> dict[str, Tensor]:
        """Hand over the pages stored under ``key``: CPU tensors ``[pages, …]`` by the names of `Pools`.

        Raises `CaptureError` if the key is not on the host.
        """
        self.synchronize()
        return self._store.take(key)

    def put_swapped(self, key: int, tensors: Mapping[str, Tensor]) -> None:
        """Store, to be swapped in, what `take_swapped` gave, here or in an executor of equal model and page size.

        The tensors are kept, not copied. Raises `CaptureError`, storing nothing, for a key in use or tensors that do
        not fit the pools.
        """
        self._check_usable()
        self.synchronize()
        self._store.put(key, tensors)

    def update_weights(self, tensors: Mapping[str, Tensor]) -> None:
        """Write new weights, keyed by public names, in place: recordings stay valid, later steps see them.

        KV that older weights computed stays as it is. Raises `CheckpointError`, writing nothing, if a name is
        missing or unexpected, or a shape or dtype is wrong.
        """
        self._check_usable()
        self.synchronize()
        with self._device.running():
            self._model.load_(tensors)
        self.synchronize()
        self._static.check()

    @property
    def programs(self) -> Programs:
        """The recorded programs."""
        return self._programs

    @property
    def core(self) -> CapturedLadder:
        """CORE and its ladder."""
        return self._programs.core

    @property
    def coda(self) -> CapturedLadder:
        """Greedy CODA; its ladder is that of all programs over coda rows."""
        return self._programs.coda

    @property
    def stats(self) -> ExecutorStats:
        """Counts since start-up."""
        programs = self._programs
        return ExecutorStats(
            steps=self._steps,
            core=programs.core.stats,
            coda=programs.coda.stats,
            coda_full=programs.coda_full.stats,
            copy_exits=programs.copy_exits.stats,
            tables=programs.tables.stats,
            swap=self._store.stats,
        )

    # -- one step ------------------------------------------------------------------------------------------

    def _has_passed(self, number: int, slot: HostSlot, *, wait: bool) -> bool:
        """Whether the device is done with a step's host memory; if ``wait``, once it is. Raises `EngineError`."""
        try:
            if not wait and not slot.done.query():
                return False
            slot.done.synchronize()
        except RuntimeError as error:
            raise self._failed(number, error) from error
        return True

    def _failed(self, number: int, error: Exception) -> EngineError:
        """What to raise for a step that failed; nothing runs behind it."""
        reason = str(error).strip().split("\n")[0]
        self._failure = f"step {number} failed after its launch ({reason}); build a new executor"
        return EngineError(f"step {number}: failed after its launch: {reason}")

    def _check_usable(self) -> None:
        reason = self._refusal or self._failure
        if reason:
            raise EngineError(f"executor: {reason}")

    def _prepare(self, step: StepInputs, slot: HostSlot) -> int:
        """Pack the step and find everything that could be wrong with it. Raises `CaptureError`.

        Returns the number of packed buffers it takes.
        """
        moves = step.swap_out or step.swap_in or step.swap_drop
        if step.rows:
            self._programs.core.check(step.bucket, step.rows)
        elif not (step.coda_slot or _has_updates(step) or moves):
            raise CaptureError("step: has neither rows, coda rows, updates nor swaps; submit no empty step")
        if step.coda_slot:
            self._coda_program(step).check(step.coda_bucket, len(step.coda_slot))
        parts = self._layout.parts(step)
        for part in range(parts):
            packed = slot.staging(part).array
            self._layout.pack(step, packed, part, parts)
            self._bounds.check(packed)
        self._static.check()
        self._store.accept(step.swap_out, step.swap_in, step.swap_drop)  # the last: it takes note of what it accepts
        return parts

    def _run(self, number: int, step: StepInputs, slot: HostSlot, parts: int) -> None:
        """Launch a step that was prepared. Raises `EngineError` if it, or an earlier one, failed."""
        if self._failure:
            raise EngineError(f"step {number}: was not run, since {self._failure}")
        done = False
        try:
            with self._device.running():
                self._launch(step, slot, parts)
                slot.done.record()
            done = True
        except _LAUNCH_ERRORS as error:
            raise self._failed(number, error) from error
        finally:
            if not (done or self._failure):
                self._failure = f"step {number} failed after its launch; build a new executor"

    def _run_there(self, threads: int, number: int, step: StepInputs, slot: HostSlot, parts: int) -> None:
        """`_run` on the worker: a thread has its own number of threads for operators to use."""
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        self._run(number, step, slot, parts)

    def _launch(self, step: StepInputs, slot: HostSlot, parts: int) -> None:
        audit = self._audit if self._launched % AUDIT_EVERY == 0 else None
        self._launched += 1
        programs = self._programs
        self._store.run(step.swap_out, step.swap_in, step.swap_drop)
        for part in range(parts - 1):
            self._packed.copy_(slot.staging(part).tensor, non_blocking=True)
            programs.tables.replay(1, 1)
        self._packed.copy_(slot.staging(parts - 1).tensor, non_blocking=True)
        if step.rows:
            (audit.core if audit else programs.core.replay)(step.bucket, step.rows)
        elif _has_updates(step):
            programs.tables.replay(1, 1)
        if step.coda_slot:
            self._launch_coda(step, slot, audit)
        if audit:
            audit.storage()

    def _launch_coda(self, step: StepInputs, slot: HostSlot, audit: Audit | None) -> None:
        program, rows = self._coda_program(step), len(step.coda_slot)
        for each in (program, self._programs.copy_exits)[: 1 + bool(step.coda_features & FEATURE_COPY_KV)]:
            if audit:
                audit.coda(each, step.coda_bucket, rows)
            else:
                each.replay(step.coda_bucket, rows)
        if program is self._programs.coda_full:
            slot.results.copy_(self._results, non_blocking=True)
        else:
            slot.tokens.copy_(self.io.coda_token, non_blocking=True)

    def _coda_program(self, step: StepInputs) -> CapturedLadder:
        return self._programs.coda_full if step.coda_features & FEATURE_SAMPLER else self._programs.coda


def _has_updates(step: StepInputs) -> bool:
    return bool(step.token_slot or step.page_slot or step.param_slot)


def _check_agreement(model: Model, limits: Limits, ladder: Ladder, coda_ladder: Ladder, device: Device) -> None:
    lies = model.weights.embedding.device
    if lies != device.target:
        raise ConfigError(f"device: the backend runs on {device.target}, but the model is on {lies}; load it there")
    if ladder.max != limits.max_rows:
        raise ConfigError(f"max_rows: {limits.max_rows} must be the largest core bucket, {ladder.max}")
    if coda_ladder.max != limits.max_coda_rows:
        raise ConfigError(f"max_coda_rows: {limits.max_coda_rows} must be the largest coda bucket, {coda_ladder.max}")
    if limits.max_model_len > model.max_model_len:
        raise ConfigError(
            f"max_model_len: {limits.max_model_len} exceeds the {model.max_model_len} positions of the model; "
            "lower it, or load the model for more"
        )
