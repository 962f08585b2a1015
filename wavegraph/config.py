"""Every option of the engine, validated on its own. Imports no torch.

What follows from the options together with a model (ladders, pools, limits) is derived in one place,
`wavegraph.startup.sizing.derive`.
"""

from dataclasses import dataclass
from typing import Literal

from wavegraph.errors import ConfigError

DEFAULT_BATCHED_TOKENS = 256
"""Row budget of a step when neither it nor the buckets are given."""

DEFAULT_MODEL_LEN = 2048
"""The most that ``max_model_len=None`` means over ATen operators: there each row costs the longest possible context."""

DEFAULT_KV_CACHE_BYTES = 4 << 30
"""The most bytes of the pool when neither ``num_pages`` nor ``kv_cache_bytes`` is given."""

KV_LAYOUTS = ("last_exited", "shared")
CHOICES = {
    "packing": ("fill", "fifo"),
    "step_mix": ("fused", "separate"),
    "stage_policy": ("decode_first", "refill", "fifo"),
    "admission": ("incremental", "worst_case"),
    "admission_order": ("fcfs", "priority"),
}
AT_LEAST_ONE = (
    "max_num_seqs",
    "page_size",
    "max_decode_steps_before_prefill",
    "max_prefill_steps_before_decode",
    "run_ahead",
)
POOL_SIZES = ("num_pages", "kv_cache_bytes", "kv_cache_fraction")
AT_LEAST_ONE_OR_NONE = ("max_num_batched_tokens", "max_model_len", "num_pages", "kv_cache_bytes", "threads")


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Options of one engine. All have defaults; a bad value raises `ConfigError`.

    - ``wavefront``: run ready (span, depth) tasks of any request, chunk and depth in one step; if False, each
      batch of chunks runs through all depths before the next one (ordinary chunked prefill).
    - ``prefill_chunk_size``: the most rows of one request at one depth in one step. ``"auto"``: a turn is 16 rows, and
      what is then left of the step goes to spans that have more rows ready.
    - ``max_num_batched_tokens``: the most rows of a step. None: the largest bucket, or 256 without ``buckets``.
    - ``max_num_seqs``: the most requests alive at once; the rest wait.
    - ``max_model_len``: the most tokens of one request, prompt and output together. None: the model's own
      limit, but at most what the pool holds, and 2048 over ATen operators (a warning says if that is less).
    - ``page_size``: positions per page.
    - ``num_pages``, ``kv_cache_bytes`` or ``kv_cache_fraction`` of the machine's memory (one of them): the size of the
      pool. None given: enough for ``max_num_seqs`` requests of full length, but at most 4 GiB and half the memory, or
      what is left of a GPU's. There, buckets are given up, with a warning, if memory is too short for all.
    - ``buckets``: row counts to record, the largest at least the row budget. None: powers of two and their
      midpoints up to the budget.
    - ``kv_layout``: ``"last_exited"``, where each depth has its own KV plane; the only one there is.

    Scheduling:

    - ``packing``: ``"fill"`` cuts and joins spans so that steps fill their buckets, by the seconds that the cost model
      predicts; ``"fifo"`` runs all that is ready in the RFC's order, and pads.
    - ``target_itl_ms``: while decodes are live, prompt rows take no step past this many milliseconds, divided by the
      model's loops: so a token at full depth comes in that time, by the measured cost model.
    - ``step_mix``: ``"fused"`` steps hold prompt and decode rows side by side, ``"separate"`` ones only one kind.
      Without ``wavefront`` they are always separate.
    - ``stage_policy``: who goes first when both prompt and decode rows are ready. ``"decode_first"``: decode, but
      prompts after they were shut out of ``max_decode_steps_before_prefill`` steps; ``"refill"``: prompts, but decode
      after ``max_prefill_steps_before_decode``; ``"fifo"``: whoever has waited longest.
    - ``admission_order``: ``"fcfs"``, or ``"priority"``, where a level is worth 1000 arrivals. ``max_bypass`` requests
      may be admitted past one that does not fit yet. ``refill=False`` admits only into an empty engine (cohorts).
    - ``admission``: ``"incremental"`` admits a request when its prompt fits, lets it grow, and preempts the least
      important when pages run out; ``"worst_case"`` admits it with all the pages it could need.
    - ``swap_bytes``: host memory for preempted requests; those that do not fit are recomputed.
    - ``prefix_cache``: share the pages of prompts that begin alike.
    - ``async_scheduling``: plan up to ``run_ahead`` steps ahead while a worker thread runs them.

    Other:

    - ``check``: have an independent checker judge each plan before it runs, and look over every eighth step: replay
      against eager run, addresses, canaries round all buffers (`wavegraph.capture.audit`). What it finds raises
      `EngineError`.
    - ``deterministic``: a row gets the same bits in any company and at every bucket. `compiled` always works so; `cuda`
      then takes matrix products of our own in place of cuBLAS; the others cannot, and refuse it.
    - ``threads``: CPU threads of torch in this process. None: leave as it is.
    """

    wavefront: bool = True
    prefill_chunk_size: int | Literal["auto"] = "auto"
    max_num_batched_tokens: int | None = None
    max_num_seqs: int = 32
    max_model_len: int | None = None
    page_size: int = 16
    num_pages: int | None = None
    kv_cache_bytes: int | None = None
    kv_cache_fraction: float | None = None
    buckets: tuple[int, ...] | None = None
    kv_layout: str = "last_exited"
    packing: Literal["fill", "fifo"] = "fill"
    target_itl_ms: float | None = None
    step_mix: str = "fused"
    stage_policy: str = "decode_first"
    max_decode_steps_before_prefill: int = 8
    max_prefill_steps_before_decode: int = 4
    admission_order: str = "fcfs"
    max_bypass: int = 8
    refill: bool = True
    admission: str = "incremental"
    swap_bytes: int = 256 << 20
    prefix_cache: bool = True
    async_scheduling: bool = True
    run_ahead: int = 2
    check: bool = False
    deterministic: bool = False
    threads: int | None = None

    def __post_init__(self) -> None:
        for name in ("wavefront", "refill", "prefix_cache", "async_scheduling", "check", "deterministic"):
            if type(getattr(self, name)) is not bool:
                raise ConfigError(f"{name} must be True or False, got {getattr(self, name)!r}")
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise ConfigError(f"{name} must be one of {', '.join(choices)}, got {getattr(self, name)!r}")
        self._check_numbers()
        self._check_layout()
        self._check_buckets()

    @property
    def run_ahead_steps(self) -> int:
        """Steps that may be in flight at once."""
        return self.run_ahead if self.async_scheduling else 1

    @property
    def row_budget(self) -> int:
        """The most rows of a step, with the default filled in."""
        if self.max_num_batched_tokens is not None:
            return self.max_num_batched_tokens
        return max(self.buckets) if self.buckets is not None else DEFAULT_BATCHED_TOKENS

    def _check_numbers(self) -> None:
        if self.prefill_chunk_size != "auto":
            _at_least_one("prefill_chunk_size", self.prefill_chunk_size, ", or 'auto'")
        if self.target_itl_ms is not None and not (
            type(self.target_itl_ms) in (int, float) and 0 < self.target_itl_ms < float("inf")
        ):
            raise ConfigError(f"target_itl_ms must be a number of milliseconds above 0, got {self.target_itl_ms!r}")
        for name in AT_LEAST_ONE:
            _at_least_one(name, getattr(self, name))
        for name in AT_LEAST_ONE_OR_NONE:
            if getattr(self, name) is not None:
                _at_least_one(name, getattr(self, name))
        for name in ("max_bypass", "swap_bytes"):
            if type(getattr(self, name)) is not int or getattr(self, name) < 0:
                raise ConfigError(f"{name} must be an integer of at least 0, got {getattr(self, name)!r}")
        if self.kv_cache_fraction is not None and not (
            type(self.kv_cache_fraction) in (int, float) and 0 < self.kv_cache_fraction < 1
        ):
            raise ConfigError(f"kv_cache_fraction must be a number between 0 and 1, got {self.kv_cache_fraction!r}")
        given = [name for name in POOL_SIZES if getattr(self, name) is not None]
        if len(given) > 1:
            first, second = (f"{name}={getattr(self, name)}" for name in given[:2])
            raise ConfigError(f"{first} and {second} both size the KV pool: give one")

    def _check_layout(self) -> None:
        if self.kv_layout not in KV_LAYOUTS:
            raise ConfigError(f"kv_layout must be 'last_exited', got {self.kv_layout!r}")
        if self.kv_layout == "shared" and self.wavefront:
            raise ConfigError(
                "kv_layout='shared' cannot run with wavefront=True: under SHARED, chunk c1 at depth 0 depends on the "
                "final-depth KV of the preceding positions, so it cannot start before c0 has finished every depth; "
                "use kv_layout='last_exited'"
            )
        if self.kv_layout == "shared":
            raise ConfigError("kv_layout='shared' is not implemented; use kv_layout='last_exited'")

    def _check_buckets(self) -> None:
        if self.buckets is None:
            return
        if type(self.buckets) is not tuple or not self.buckets:
            raise ConfigError(f"buckets must be None or a tuple of at least one row count, got {self.buckets!r}")
        for size in self.buckets:
            _at_least_one("each of buckets", size)
        top = min((size for size in self.buckets if size >= self.row_budget), default=None)
        if top is None:
            raise ConfigError(
                f"buckets={self.buckets} do not reach max_num_batched_tokens={self.row_budget}: "
                "add a bucket of at least that size, or lower the budget"
            )
        if max(self.buckets) > top:
            raise ConfigError(
                f"buckets: {max(self.buckets)} can never run, since no step exceeds "
                f"max_num_batched_tokens={self.row_budget}; leave it out, or raise the budget"
            )


def _at_least_one(name: str, value: object, otherwise: str = "") -> None:
    if type(value) is not int or value < 1:
        raise ConfigError(f"{name} must be an integer of at least 1{otherwise}, got {value!r}")
