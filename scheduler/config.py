"""Limits and policies of the scheduler."""

from dataclasses import dataclass, field
from typing import Literal

from wavegraph.scheduler.admission import Fcfs, Ranking
from wavegraph.scheduler.order import DecodeFirst, StagePolicy

Packing = Literal["fill", "fifo"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits and policies. The caller has validated them (`wavegraph.config`).

    ``depths`` is D; ``max_num_batched_tokens`` the most rows of a step; ``max_num_seqs`` the most requests
    running at once; ``prefill_chunk_size`` the most rows of one request at one depth in a step, or None if spans grow
    into what is left of a step; ``max_model_len`` the most tokens, prompt and output, of a request; ``max_coda_rows``
    the most coda rows of a step (0: ``max_num_seqs``).

    ``packing``: ``"fill"`` runs as many of the ready rows as predicted seconds ask for, cutting spans at any row;
    ``"fifo"`` all that are ready (RFC). ``target_step_seconds`` bounds the predicted seconds of a step while decodes
    are live.

    ``fused`` lets a step hold prompt and decode rows; without ``wavefront`` it never does. ``ranking`` orders
    admission and picks who is preempted; up to ``max_bypass`` requests may be admitted past one that does not fit
    yet. ``refill`` False admits only into an empty engine (cohorts). ``reserve_worst_case`` admits a request only
    with all pages it could need; otherwise requests grow and the least important may be preempted: moved to the
    host while ``swap_pages`` pages hold, recomputed beyond that.
    """

    depths: int
    page_size: int
    num_pages: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    prefill_chunk_size: int | None
    packing: Packing = "fifo"
    target_step_seconds: float | None = None
    wavefront: bool = True
    fused: bool = True
    max_coda_rows: int = 0
    stage_policy: StagePolicy = field(default_factory=DecodeFirst)
    ranking: Ranking = field(default_factory=Fcfs)
    max_bypass: int = 8
    refill: bool = True
    prefix_cache: bool = False
    reserve_worst_case: bool = True
    swap_pages: int = 0

    @property
    def coda_row_limit(self) -> int:
        """The most coda rows of a step."""
        return self.max_coda_rows or self.max_num_seqs
