"""The picture that opens docs/architecture.md: tasks of three requests become the rows of one bucket.

It shows one step as the scheduler planned it, and what had run before.
"""

import xml.etree.ElementTree as ET
from dataclasses import dataclass

from tools.pictures.palette import Palette
from tools.pictures.steps import BUCKET, CHUNK, DEPTHS, Span, Step, steps
from tools.pictures.svg import drawing, group, path, rect, text, written


@dataclass(frozen=True, slots=True)
class Request:
    """Who comes when, and how it is drawn: below ``top``, with ``shown`` tokens."""

    name: str
    arrival: int
    prompt: int
    output: int
    about: str

    @property
    def shown(self) -> int:
        """Positions that are drawn: the prompt and, of a request that decodes, one token."""
        return self.prompt + (self.output > 1)


REQUESTS = (
    Request("A", 0, 4, 8, "decodes: its first token goes through the depths"),
    Request("B", 0, 16, 1, "prefills: four chunks at four depths"),
    Request("C", 5, 6, 1, "came one step ago"),
)
SHOWN = 6
"""The step that is drawn."""

HEIGHT = 440
MARGIN = 18
LEFT, TOP = 54, 78
"""The upper left corner of the first request's tasks."""
TOKEN, DEPTH = 18, 19
"""What a task takes for each of its positions, and its height."""
REQUEST = 117
"""From each request to the next."""
BUCKET_LEFT, BUCKET_WIDTH, ROW = 500, 196, 20


def staircase(palette: Palette) -> str:
    """The text of the picture."""
    arrivals: dict[int, list[tuple[str, int, int]]] = {}
    for request in REQUESTS:
        arrivals.setdefault(request.arrival, []).append((request.name, request.prompt, request.output))
    planned = steps(arrivals)
    past = [span for _ in range(SHOWN) for span in next(planned).spans]
    step = next(planned)
    tasks, rows = len(step.spans), step.rows
    title = f"One step: {tasks} tasks of {len(REQUESTS)} requests become {rows} rows of a bucket of {BUCKET}"
    rules = palette.css([request.name.lower() for request in REQUESTS])
    root = drawing(HEIGHT, title, [*rules, ".ribbon{opacity:.4}", ".brace{fill:none}"])
    text(root, MARGIN, 32, "Tasks: a chunk (across) at a depth (up)", "big")
    text(root, BUCKET_LEFT, 32, f"One step: a bucket of {BUCKET} rows", "big")
    _ribbons(root, step)
    for index, request in enumerate(REQUESTS):
        _request(root, index, request, past, step)
    _bucket(root, step)
    _replay(root)
    _legend(root)
    return written(root)


def _request(root: ET.Element, index: int, request: Request, past: list[Span], step: Step) -> None:
    top = TOP + index * REQUEST
    text(root, MARGIN, top - 9, request.name, "big")
    text(root, MARGIN + 18, top - 9, request.about, "quiet")
    for depth in range(DEPTHS):
        text(root, LEFT - 10, top + (DEPTHS - depth) * DEPTH - 5, str(depth), "small end quiet")
        start = 0
        while start < request.shown:
            count = min(CHUNK, (request.prompt if start < request.prompt else request.shown) - start)
            span = Span(request.name, depth, start, count)
            x, y, width, height = _place(span)
            if span in past:
                rect(root, x, y, width, height, "done")
            elif span in step.spans:
                rect(root, x, y, width, height, span.look)
            else:
                rect(root, x + 0.5, y + 0.5, width - 1, height - 1, "empty")
            start += count


def _ribbons(root: ET.Element, step: Step) -> None:
    """From each task to its rows, below everything else."""
    ribbons = group(root, "ribbon")
    row = 0
    for span in step.spans:
        x, y, width, height = _place(span)
        top, bottom = TOP + row * ROW, TOP + (row + span.count) * ROW - 1
        start, end = x + width, BUCKET_LEFT
        turn = LEFT + max(request.shown for request in REQUESTS) * TOKEN
        middle = (turn + end) / 2
        parts: list[str | float] = ["M", start, y, "H", turn, "C", middle, y, middle, top, end, top, "V", bottom]
        parts += ["C", middle, bottom, middle, y + height, turn, y + height, "H", start, "Z"]
        path(ribbons, parts, span.look)
        row += span.count


def _bucket(root: ET.Element, step: Step) -> None:
    columns = [(24, "request"), (92, "position"), (158, "depth")]
    for x, name in columns:
        text(root, BUCKET_LEFT + x, TOP - 9, name, "small mid quiet")
    row = 0
    for span in step.spans:
        block = group(root, span.look)
        for position in range(span.start, span.start + span.count):
            y = TOP + row * ROW
            rect(block, BUCKET_LEFT, y, BUCKET_WIDTH, ROW - 1)
            for (x, _), value in zip(columns, (span.request, position, span.depth), strict=True):
                text(block, BUCKET_LEFT + x, y + 14, str(value), "mid")
            row += 1
    for empty in range(row, BUCKET):
        y = TOP + empty * ROW
        rect(root, BUCKET_LEFT + 0.5, y + 0.5, BUCKET_WIDTH - 1, ROW - 2, "empty")
        text(root, BUCKET_LEFT + BUCKET_WIDTH / 2, y + 14, "padding", "mid quiet")


def _replay(root: ET.Element) -> None:
    x, middle, bottom = BUCKET_LEFT + BUCKET_WIDTH + 8, TOP + BUCKET * ROW / 2, TOP + BUCKET * ROW - 1
    path(root, ["M", x, TOP, "h", 6, "V", bottom, "h", -6, "M", x + 6, middle, "h", 6], "rule brace")
    for line, words in enumerate(("recorded once,", "replayed for", "every step of", f"up to {BUCKET} rows")):
        text(root, x + 18, middle - 22 + line * 18, words, "quiet")


def _place(span: Span) -> tuple[float, float, float, float]:
    """Where a task stands: left, top, width, height."""
    index = [request.name for request in REQUESTS].index(span.request)
    top = TOP + index * REQUEST + (DEPTHS - 1 - span.depth) * DEPTH
    return LEFT + span.start * TOKEN, top, span.count * TOKEN - 1, DEPTH - 1


def _legend(root: ET.Element) -> None:
    y = HEIGHT - 18
    x = LEFT
    rect(root, x, y - 12, 2 * TOKEN - 1, DEPTH - 1, "done")
    text(root, x + 42, y, "has run", "quiet")
    for depth in range(DEPTHS):
        rect(root, x + 110 + depth * 12, y - 12, 11, DEPTH - 1, f"b{depth}")
    text(root, x + 166, y, "runs in this step", "quiet")
    rect(root, x + 286.5, y - 11.5, 2 * TOKEN - 2, DEPTH - 2, "empty")
    text(root, x + 328, y, "waits for the cells below and to the left", "quiet")
