"""What the steps of a benchmark cost, measured in the same process between its runs."""

from collections import defaultdict
from time import perf_counter, thread_time

import torch

from wavegraph.buckets.cost import CostModel
from wavegraph.buckets.fit import BucketMeasure, ReplayTime, fit_cost
from wavegraph.buckets.profile import points_of
from wavegraph.buckets.samples import Point
from wavegraph.capture.ladder import CapturedLadder
from wavegraph.engine.engine import Engine
from wavegraph.model.sampling import Action
from wavegraph.sampling import SamplingParams
from wavegraph.scheduler.packing import attended

HOST_STEPS_TOKENS = 8


class CostMeter:
    """Replays of an idle asynchronous engine, whose tables are written over and come right with its next requests.

    A bucket's rows are spans of ``span_rows`` rows, or longer where there are more of them than the depths of as many
    requests as may run; they end at a quarter of the longest context, and at all of it. (In `wavegraph.study.profile`
    each span has a request of its own, of which there may be too few here.)
    """

    def __init__(self, engine: Engine, span_rows: int) -> None:
        self._engine = engine
        self._span_rows = min(span_rows, engine.executor.limits.max_model_len)
        self._executor = engine.executor
        limits, depths = engine.executor.limits, engine.model.config.total_ut_steps
        self._pairs = [(slot, depth) for depth in range(depths) for slot in range(limits.max_num_seqs)]
        self._pages = limits.num_pages // limits.max_num_seqs
        most = max(self._span_rows, -(-limits.max_rows // len(self._pairs)))
        contexts = sorted({min(limits.max_model_len, max(most, limits.max_model_len // 4)), limits.max_model_len})
        ladders = self._executor.core.ladder.sizes, self._executor.coda.ladder.sizes
        self._points = points_of(*ladders, contexts)
        self._seconds: dict[tuple[Point, int], list[float]] = defaultdict(list)
        self._host: list[float] = []
        for pool in (self._executor.pools.k, self._executor.pools.v, self._executor.pools.hidden):
            pool[0].normal_()
            pool[1:] = pool[:1]

    def visit(self) -> None:
        """Time one replay of each bucket at each context, after one that finds it cold, and the host."""
        self._time_host()
        order = torch.arange(self._executor.limits.num_pages)
        table = self._executor.io.page_table[:-1]
        table.copy_((order[: len(table), None] * self._pages + order[: table.shape[1]]) % len(order))
        for point in self._points:
            positions = self._prepare(point)
            program = self._program(point)
            program.replay(point.rows, point.rows)
            started = perf_counter()
            program.replay(point.rows, point.rows)
            self._seconds[point, positions].append(perf_counter() - started)

    def cost(self) -> CostModel:
        """The model fitted to all visits."""
        host = sorted(self._host)[len(self._host) // 2]
        return fit_cost(
            self._measures("core"), self._measures("coda"), host_seconds=host, source="measured beside the benchmark"
        )

    def _measures(self, name: str) -> list[BucketMeasure]:
        replays: dict[int, list[ReplayTime]] = defaultdict(list)
        for (point, positions), seconds in self._seconds.items():
            if point.program == name:
                replays[point.rows].append(ReplayTime.of(point.context, positions, seconds))
        return [BucketMeasure(rows, 0.0, 0, 0, tuple(times)) for rows, times in replays.items()]

    def _program(self, point: Point) -> CapturedLadder:
        return self._executor.core if point.program == "core" else self._executor.coda

    def _prepare(self, point: Point) -> int:
        """Lay out the rows of a bucket; returns the positions that they attend."""
        io = self._executor.io
        io.span_count.zero_()
        if point.program == "coda":
            io.coda_slot[: point.rows] = torch.arange(point.rows, dtype=torch.int32)
            io.coda_pos.zero_()
            io.coda_depth.zero_()
            io.coda_action.fill_(Action.SAMPLE)
            return 0
        spans = min(len(self._pairs), -(-point.rows // self._span_rows))
        share, more = divmod(point.rows, spans)
        counts = [share + (index < more) for index in range(spans)]
        for index, count in enumerate(counts):
            io.span_slot[index], io.span_depth[index] = self._pairs[index]
            io.span_start[index], io.span_count[index] = point.context - count, count
        io.header.zero_()  # no updates of tables either
        io.header[:2] = torch.tensor([len(counts), point.rows], dtype=torch.int32)
        return sum(attended(point.context - count, count) for count in counts)

    def _time_host(self) -> None:
        """CPU time of this thread in steps of a few requests; another thread runs the replays."""
        engine, limits = self._engine, self._executor.limits
        tokens = min(HOST_STEPS_TOKENS, limits.max_model_len - 1)
        for index in range(limits.max_num_seqs):
            engine.add_request(str(index), [1], SamplingParams(max_tokens=tokens, ignore_eos=True))
        while engine.has_unfinished:
            started = thread_time()
            engine.step()
            self._host.append(thread_time() - started)
