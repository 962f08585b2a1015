"""Replays of one bucket after another of an engine: what `wavegraph.buckets.profile` drives.

CORE and CODA are replayed by themselves, on inputs that stay: spans of `SPAN_ROWS` rows, each of a request of its own,
that end at a context. Keys and values are random, and lie in pages in random order.
"""

from collections.abc import Iterator, Sequence
from time import perf_counter

import torch

from wavegraph.buckets.samples import Captured, Point
from wavegraph.engine.engine import Engine
from wavegraph.errors import ConfigError
from wavegraph.model.sampling import Action
from wavegraph.sampling import SamplingParams
from wavegraph.study.measure import matrix_rate, read_rate

SPAN_ROWS = 16
HOST_REQUESTS, HOST_PROMPT, HOST_TOKENS = 8, 24, 8


class BucketProbe:
    """Replays of an idle, synchronous engine (``run_ahead`` 1). Its pools and tables are written over: it is spent.

    Raises `ConfigError` if ``contexts``, the largest of which must hold a span, do not fit the engine's pool.
    """

    def __init__(self, engine: Engine, contexts: Sequence[int], span_rows: int = SPAN_ROWS) -> None:
        self._engine = engine
        self._executor = engine.executor
        self._span_rows = span_rows
        self._pages = -(-max(contexts) // engine.executor.limits.page_size)
        self._filled = False
        limits = self._executor.limits
        slots = -(-limits.max_rows // span_rows)
        pages = slots * self._pages
        if slots > min(limits.max_num_seqs, limits.max_spans) or pages > limits.num_pages:
            raise ConfigError(
                f"contexts: {slots} requests of {max(contexts)} positions need {slots} slots and {pages} pages, "
                f"but the engine has {limits.max_num_seqs} and {limits.num_pages}; lower contexts, or the largest batch"
            )
        if min(contexts) < min(span_rows, limits.max_rows):
            raise ConfigError(f"contexts: {min(contexts)} cannot end a span of {span_rows} rows; raise it")

    def captured(self) -> Iterator[Captured]:
        """Facts of each recording."""
        for program, ladder in (("core", self._executor.core), ("coda", self._executor.coda)):
            for rows, facts in ladder.facts.items():
                yield Captured(program, rows, facts.seconds, facts.bytes, facts.nodes)

    def host_seconds(self) -> list[float]:
        """Steps of `HOST_REQUESTS` requests together, prompt and output, each without its replays."""
        engine, length = self._engine, self._executor.limits.max_model_len
        prompt = max(1, min(HOST_PROMPT, length - HOST_TOKENS))
        params = SamplingParams(max_tokens=min(HOST_TOKENS, length - prompt), ignore_eos=True)
        for index in range(HOST_REQUESTS):
            engine.add_request(str(index), [(index + 1) % engine.model.config.vocab_size] * prompt, params)
        seconds = []
        while engine.has_unfinished:
            replayed, started = self._replay_seconds(), perf_counter()
            engine.step()
            seconds.append(perf_counter() - started - (self._replay_seconds() - replayed))
        return seconds

    def _replay_seconds(self) -> float:
        stats = self._executor.stats
        return sum(each.seconds for each in (stats.core, stats.coda, stats.coda_full, stats.copy_exits, stats.tables))

    def rates(self) -> dict[str, float]:
        """Memory read rate in GB/s, matrix rate in TFLOP/s."""
        return {"read_gbs": read_rate(), "matrix_tflops": matrix_rate(self._engine.model.dtype)}

    def prepare(self, point: Point) -> int:
        """Lay out the spans of a CORE bucket, or the rows of a CODA bucket."""
        io = self._executor.io
        if not self._filled:
            self._fill_pools()
            self._filled = True
        io.span_count.zero_()
        if point.program == "coda":
            io.coda_slot[: point.rows] = torch.arange(point.rows, dtype=torch.int32)
            io.coda_pos.zero_()
            io.coda_depth.fill_(self._engine.model.config.total_ut_steps - 1)
            io.coda_action.fill_(Action.SAMPLE)
            return 0
        spans = -(-point.rows // self._span_rows)
        counts = torch.full((spans,), self._span_rows, dtype=torch.int32)
        counts[-1] = point.rows - (spans - 1) * self._span_rows
        io.header[:2] = torch.tensor([spans, point.rows], dtype=torch.int32)
        io.span_slot[:spans] = torch.arange(spans, dtype=torch.int32)
        io.span_depth[:spans] = torch.arange(spans, dtype=torch.int32) % self._engine.model.config.total_ut_steps
        io.span_start[:spans] = point.context - counts
        io.span_count[:spans] = counts
        return sum(count * (point.context - count) + count * (count + 1) // 2 for count in counts.tolist())

    def replay(self, point: Point) -> None:
        """One replay."""
        program = self._executor.core if point.program == "core" else self._executor.coda
        program.replay(point.rows, point.rows)

    def _fill_pools(self) -> None:
        """The same random keys and values in every page, and pages for every slot; those of spans are theirs alone."""
        pools, io, limits = self._executor.pools, self._executor.io, self._executor.limits
        io.header.zero_()
        for entries in (io.span_slot, io.token_slot, io.page_slot, io.param_slot, io.coda_slot):
            entries.fill_(limits.scratch_slot)  # no updates that a step of `host_seconds` left are made again
        for pool in (pools.k, pools.v, pools.hidden):
            pool[0].normal_()
            pool[1:] = pool[:1]
        table = io.page_table[:-1]
        slots, blocks = (torch.arange(size) for size in table.shape)
        order = torch.randperm(limits.num_pages, generator=torch.Generator().manual_seed(0))
        table.copy_(order[(slots[:, None] * self._pages + blocks) % limits.num_pages])
