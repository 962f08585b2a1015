"""A trace of every step in Chrome's format: open the file in Perfetto or chrome://tracing.

A lane per depth shows the wavefront (rows of each step at that depth), one lane the host's planning, one the device's
steps; counters show rows, padding, queue and free pages; each request is a line from its arrival to its end, so that
`wavegraph.study.workload` can read the workload back.
"""

import json
from pathlib import Path
from typing import Any, Protocol, TextIO

from wavegraph.errors import OutputError
from wavegraph.scheduler.plan import StepPlan

HOST, DEVICE, FIRST_DEPTH = 1, 2, 10

REQUEST_EVENT = "request"
"""Category of the events that hold a whole request."""


class StepObserver(Protocol):
    """Who is told about every step. It is called by the engine's thread, and keeps that waiting while it works."""

    def step(self, plan: StepPlan, times: tuple[float, float, float, float], waiting: int, free_pages: int) -> None:
        """One step. ``times`` in seconds: planning began, was submitted, device began, result was seen."""

    def close(self) -> None:
        """There will be no more steps. May be called twice."""


class TraceWriter:
    """Writes events as they happen; the file is valid JSON once closed, and readable by Perfetto even if it is not."""

    def __init__(self, path: str | Path, depths: int) -> None:
        self._path = path
        try:
            self._file: TextIO = Path(path).open("w", encoding="utf-8")  # noqa: SIM115 - open until `close`
        except OSError as error:
            raise self._unwritable(error) from error
        self._write("[")
        self._first = True
        self._requests = 0
        names = {HOST: "host: plan", DEVICE: "device: step"}
        names |= {FIRST_DEPTH + depth: f"depth {depth}" for depth in range(depths)}
        for lane, name in names.items():
            self._event({"ph": "M", "name": "thread_name", "tid": lane, "args": {"name": name}})
            self._event({"ph": "M", "name": "thread_sort_index", "tid": lane, "args": {"sort_index": lane}})

    def step(self, plan: StepPlan, times: tuple[float, float, float, float], waiting: int, free_pages: int) -> None:
        """One step. ``times`` in seconds: planning began, was submitted, device began, result was seen."""
        planned, submitted, began, ended = times
        args = {
            "step": plan.step_id,
            "rows": plan.rows,
            "bucket": plan.bucket,
            "padding": plan.bucket - plan.rows,
            "padding_reason": plan.padding_reason,
            "coda_rows": len(plan.coda_slot),
            "coda_bucket": plan.coda_bucket,
        }
        self._span(HOST, f"plan {plan.step_id}", planned, submitted, args)
        self._span(DEVICE, f"step {plan.step_id}", began, ended, args)
        rows: dict[int, int] = {}
        for depth, count in zip(plan.span_depth, plan.span_count, strict=True):
            rows[depth] = rows.get(depth, 0) + count
        for depth, count in sorted(rows.items()):
            spans = [
                f"{task.request_id}[{task.token_start}:{task.token_end}]" for task in plan.tasks if task.depth == depth
            ]
            self._span(FIRST_DEPTH + depth, f"{count} rows", began, ended, {"step": plan.step_id, "spans": spans})
        self._counter("rows", began, {"live": plan.rows, "padding": plan.bucket - plan.rows})
        self._counter("waiting requests", began, {"waiting": waiting})
        self._counter("free pages", began, {"pages": free_pages})

    def request(
        self, request_id: str, arrival: float, ended: float, prompt_tokens: int, output_tokens: int, reason: str
    ) -> None:
        """A request has ended; times in seconds. Requests overlap, so each is a line of its own."""
        args = {"prompt_tokens": prompt_tokens, "output_tokens": output_tokens, "finish_reason": reason}
        key = {"cat": REQUEST_EVENT, "name": request_id, "id": self._requests, "tid": 0}
        self._event({"ph": "b", "ts": round(arrival * 1e6, 1), "args": args, **key})
        self._event({"ph": "e", "ts": round(ended * 1e6, 1), **key})
        self._requests += 1

    def close(self) -> None:
        """Complete the file. May be called twice. Raises `OutputError` if it could not be written."""
        if not self._file.closed:
            self._write("\n]\n")
            try:
                self._file.close()
            except OSError as error:
                raise self._unwritable(error) from error

    def _unwritable(self, error: OSError) -> OutputError:
        return OutputError(f"trace: {self._path} cannot be written: {error.strerror}; give another path")

    def _write(self, text: str) -> None:
        try:
            self._file.write(text)
        except OSError as error:
            raise self._unwritable(error) from error

    def _span(self, lane: int, name: str, start: float, end: float, args: dict[str, Any]) -> None:
        micros = {"ts": round(start * 1e6, 1), "dur": round(max(end - start, 0.0) * 1e6, 1)}
        self._event({"ph": "X", "name": name, "tid": lane, "args": args, **micros})

    def _counter(self, name: str, at: float, values: dict[str, int]) -> None:
        self._event({"ph": "C", "name": name, "tid": 0, "ts": round(at * 1e6, 1), "args": values})

    def _event(self, event: dict[str, Any]) -> None:
        self._write(("\n" if self._first else ",\n") + json.dumps({"pid": 1, **event}))
        self._first = False
