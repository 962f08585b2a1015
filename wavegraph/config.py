"""Every option of the engine, validated on its own. Imports no torch.

What follows from the options together with a model (ladders, pools, limits) is derived in one place,
`wavegraph.sizing.derive`.
"""

from dataclasses import dataclass

from wavegraph.errors import ConfigError

DEFAULT_BATCHED_TOKENS = 256
"""Row budget of a step when neither it nor the buckets are given."""

DEFAULT_MODEL_LEN = 2048
"""The most that ``max_model_len=None`` means: the ATen attention costs each row the longest possible context."""

DEFAULT_KV_CACHE_BYTES = 4 << 30
"""The most bytes of the pool when neither ``num_pages`` nor ``kv_cache_bytes`` is given."""

KV_LAYOUTS = ("last_exited", "shared")


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Options of one engine. All have defaults; a bad value raises `ConfigError`.

    - ``wavefront``: run ready (span, depth) tasks of any request, chunk and depth in one step; if False, each
      batch of chunks runs through all depths before the next one (ordinary chunked prefill).
    - ``prefill_chunk_size``: the most prompt rows of one request at one depth in one step.
    - ``max_num_batched_tokens``: the most rows of a step. None: the largest bucket, or 256 without ``buckets``.
    - ``max_num_seqs``: the most requests alive at once; the rest wait.
    - ``max_model_len``: the most tokens of one request, prompt and output together. None: the model's own
      limit, but at most 2048 and what the pool holds (a warning says if that is less).
    - ``page_size``: positions per page.
    - ``num_pages`` or ``kv_cache_bytes`` (not both): the size of the pool. Neither: enough for
      ``max_num_seqs`` requests of full length, but at most 4 GiB.
    - ``buckets``: row counts to record, the largest at least the row budget. None: powers of two and their
      midpoints up to the budget.
    - ``kv_layout``: ``"last_exited"``, where each depth has its own KV plane; the only one there is.
    - ``check``: have an independent checker judge each plan before it runs; a bad one raises `EngineError`.
    - ``threads``: CPU threads of torch in this process. None: leave as it is.
    """

    wavefront: bool = True
    prefill_chunk_size: int = 64
    max_num_batched_tokens: int | None = None
    max_num_seqs: int = 32
    max_model_len: int | None = None
    page_size: int = 16
    num_pages: int | None = None
    kv_cache_bytes: int | None = None
    buckets: tuple[int, ...] | None = None
    kv_layout: str = "last_exited"
    check: bool = False
    threads: int | None = None

    def __post_init__(self) -> None:
        for name in ("wavefront", "check"):
            if type(getattr(self, name)) is not bool:
                raise ConfigError(f"{name} must be True or False, got {getattr(self, name)!r}")
        for name in ("prefill_chunk_size", "max_num_seqs", "page_size"):
            _at_least_one(name, getattr(self, name))
        for name in ("max_num_batched_tokens", "max_model_len", "num_pages", "kv_cache_bytes", "threads"):
            if getattr(self, name) is not None:
                _at_least_one(name, getattr(self, name))
        if self.num_pages is not None and self.kv_cache_bytes is not None:
            raise ConfigError(
                f"num_pages={self.num_pages} and kv_cache_bytes={self.kv_cache_bytes} both size the KV pool: give one"
            )
        self._check_layout()
        self._check_buckets()

    @property
    def row_budget(self) -> int:
        """The most rows of a step, with the default filled in."""
        if self.max_num_batched_tokens is not None:
            return self.max_num_batched_tokens
        return max(self.buckets) if self.buckets is not None else DEFAULT_BATCHED_TOKENS

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


def _at_least_one(name: str, value: object) -> None:
    if type(value) is not int or value < 1:
        raise ConfigError(f"{name} must be an integer of at least 1, got {value!r}")
