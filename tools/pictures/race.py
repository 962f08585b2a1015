"""The picture of the README: the same prompts with wavefront off and on, step by step.

It moves by CSS alone, and only where the reader has not asked for less motion. Without motion it shows the end.
"""

import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import dataclass

from tools.pictures.palette import Palette
from tools.pictures.steps import BUCKET, CHUNK, DEPTHS, Span, Step, steps
from tools.pictures.svg import WIDTH, circle, drawing, group, path, rect, text, written

PROMPTS = {"A": 12, "B": 8, "C": 10}

HEIGHT = 524
MARGIN = 18
TOP, PANEL = 66, 222
"""The first panel's baseline, and from each panel to the next."""
BOARD, TASK = 40, (19, 10)
"""The board's left edge, and what a task takes of it."""
FIRST, PITCH = 176, 26.4
"""The first bucket's left edge, and from each to the next."""
SPAN, ROW = 22, 9
"""A bucket's width, and the height of a row in it."""
LINE = 24
"""Between the values of a counter."""

LEAD, BEAT, HOLD, FADE = 0.6, 0.4, 5.0, 0.7
"""Seconds: before the first step, a step, after the last one, and the end of a round."""


@dataclass(frozen=True, slots=True)
class Run:
    """A way to run the prompts, and what it is."""

    title: str
    about: str
    steps: tuple[Step, ...]

    @property
    def empty(self) -> str:
        """The share of replayed rows that carried no work."""
        return self.empty_after(len(self.steps))

    def empty_after(self, count: int) -> str:
        """The same of the first steps."""
        rows = sum(step.rows for step in self.steps[:count])
        return f"{1 - rows / (BUCKET * count):.0%}" if count else "0%"


def runs() -> tuple[Run, Run]:
    """Wavefront off and on."""
    arrivals = {0: [(name, prompt, 1) for name, prompt in PROMPTS.items()]}
    off, on = (tuple(steps(arrivals, wavefront=wavefront)) for wavefront in (False, True))
    return (
        Run("Wavefront off", "a chunk goes through all passes before the next one starts", off),
        Run("Wavefront on", "a later chunk starts while earlier ones are in deeper passes", on),
    )


def race(palette: Palette) -> str:
    """The text of the picture."""
    both = runs()
    longest = max(len(run.steps) for run in both)
    rules = [*palette.css([name.lower() for name in PROMPTS]), ".huge{font-size:22px;font-weight:600}"]
    title = "; ".join(f"{run.title}: {len(run.steps)} steps, {run.empty} of their rows padding" for run in both)
    root = drawing(HEIGHT, title, [*rules, *motion([len(run.steps) for run in both])])
    words = (
        f"{len(PROMPTS)} prompts, {DEPTHS} passes through the same layers; chunks of {CHUNK} tokens, "
        f"every step one bucket of {BUCKET} rows"
    )
    text(root, MARGIN, 32, words)
    for index, run in enumerate(both):
        _panel(root, TOP + index * PANEL, run, longest)
    _verdict(root, TOP + PANEL + 60, *both)
    _legend(root, TOP + 2 * PANEL - 4)
    return written(root)


def motion(counts: Sequence[int]) -> list[str]:
    """Rules by which step k comes at its beat, is outlined until the next one, and the counters count."""
    whole = LEAD + max(counts) * BEAT + HOLD + FADE

    def at(step: float) -> str:
        return f"{100 * (LEAD + step * BEAT) / whole:.2f}%"

    rules = [
        f".moves{{animation-duration:{whole:g}s;animation-iteration-count:infinite}}",
        f"@keyframes round{{0%,{100 * (1 - FADE / whole):.2f}%{{opacity:1}}100%{{opacity:0}}}}",
        ".round{animation-name:round}",
    ]
    for k in range(max(counts)):
        rules += [
            f"@keyframes s{k}{{0%,{at(k)}{{opacity:0}}{at(k + 0.3)},100%{{opacity:1}}}}",
            f"@keyframes n{k}{{0%,{at(k)}{{opacity:0}}{at(k + 0.1)},{at(k + 0.9)}{{opacity:1}}"
            f"{at(k + 1)},100%{{opacity:0}}}}",
            f".s{k}{{animation-name:s{k}}}",
            f".n{k}{{animation-name:n{k}}}",
        ]
    still = [".now{opacity:0}"]
    for count in counts:
        last = f"transform:translateY({-LINE * count}px)"
        still.append(f".c{count}{{{last}}}")
        rules += [
            f"@keyframes c{count}{{0%,{at(0)}{{transform:none;animation-timing-function:steps({count},start)}}"
            f"{at(count)},100%{{{last}}}}}",
            f"@keyframes end{count}{{0%,{at(count)}{{opacity:0}}{at(count + 1)},100%{{opacity:1}}}}",
            f".c{count}{{animation-name:c{count}}}",
            f".end{count}{{animation-name:end{count}}}",
        ]
    return [*still, "@media (prefers-reduced-motion:no-preference){", *rules, "}"]


def _panel(root: ET.Element, y: float, run: Run, longest: int) -> None:
    text(root, MARGIN, y, run.title, "big")
    text(root, MARGIN + 122, y, run.about, "quiet")
    _counter(root, y, run)
    y += 16
    _board_frame(root, y)
    bottom = y + BUCKET * ROW
    text(root, BOARD, bottom + 14, "→ chunks, ↑ passes", "small quiet")
    path(root, ["M", FIRST, bottom + 0.5, "H", FIRST + longest * PITCH - PITCH + SPAN], "rule")
    moving = group(root, "moves round")
    for k, step in enumerate(run.steps):
        shown, now = group(moving, f"moves s{k}"), group(moving, f"moves n{k} now")
        x = FIRST + k * PITCH
        _bucket(shown, x, bottom, step)
        text(shown, x + SPAN / 2, bottom + 14, str(k + 1), "small mid quiet")
        for index, name in enumerate(step.tokens):
            _badge(shown, x + SPAN / 2 + 19 * (index - (len(step.tokens) - 1) / 2), bottom + 28, name)
        for span in step.spans:
            place = _task(y, span)
            rect(shown, *place, span.look, radius=1)
            rect(now, *place, radius=1)


def _counter(root: ET.Element, y: float, run: Run) -> None:
    """All values of a counter, one below the other, of which a window shows one."""
    window = group(root, "")
    window.set("clip-path", f"url(#w{len(run.steps)})")
    clip = ET.SubElement(root, "clipPath", {"id": f"w{len(run.steps)}"})
    rect(clip, WIDTH / 2, y - 16, WIDTH / 2, LINE)
    lines = group(window, f"moves c{len(run.steps)}")
    for count in range(len(run.steps) + 1):
        words = f"{count} step{'s' * (count != 1)}, {run.empty_after(count)} padding"
        text(lines, WIDTH - MARGIN, y + count * LINE, words, "big end")


def _bucket(parent: ET.Element, x: float, bottom: float, step: Step) -> None:
    """Rows from the bottom up, a rectangle with its depth for each span, and what is left empty."""
    filled = 0
    for span in step.spans:
        height = span.count * ROW
        y = bottom - filled * ROW - height
        block = group(parent, span.look)
        rect(block, x, y + 0.5, SPAN, height - 1)
        text(block, x + SPAN / 2, y + height / 2 + 4, str(span.depth), "small mid")
        filled += span.count
    if filled < BUCKET:
        rect(parent, x + 0.5, bottom - BUCKET * ROW + 0.5, SPAN - 1, (BUCKET - filled) * ROW - 1.5, "empty")


def _board_frame(root: ET.Element, y: float) -> None:
    """Tasks to do: a request below the other, a column for each chunk, depth 0 at the bottom."""
    for name, prompt in PROMPTS.items():
        top = _task(y, Span(name, DEPTHS - 1, 0, CHUNK))[1]
        text(root, MARGIN, top + DEPTHS * TASK[1] / 2 + 4, name, "big")
        for chunk in range(prompt // CHUNK):
            for depth in range(DEPTHS):
                rect(root, *_task(y, Span(name, depth, chunk * CHUNK, CHUNK)), "done", radius=1)


def _task(y: float, span: Span) -> tuple[float, float, float, float]:
    """Where a task stands on the board whose upper edge is y: left, top, width, height."""
    width, height = TASK
    place = list(PROMPTS).index(span.request)
    top = y + place * (BUCKET * ROW - DEPTHS * height) / (len(PROMPTS) - 1)
    return BOARD + span.start // CHUNK * width, top + (DEPTHS - 1 - span.depth) * height, width - 1, height - 1


def _badge(parent: ET.Element, x: float, y: float, name: str) -> None:
    mark = group(parent, f"{name.lower()}3")
    circle(mark, x, y, 9)
    text(mark, x, y + 4, name, "small mid")


def _verdict(root: ET.Element, y: float, off: Run, on: Run) -> None:
    """In the room that the steps have left."""
    left = FIRST + len(on.steps) * PITCH + 24
    lines = group(group(root, "moves round"), f"moves end{len(off.steps)}")
    rows = sum(step.rows for step in on.steps)
    text(lines, left, y, f"{len(on.steps)} steps instead of {len(off.steps)}", "huge")
    text(lines, left, y + 24, f"The same {rows} rows of work and the same tokens,", "quiet")
    text(lines, left, y + 42, "in fewer replays of the same recorded bucket.", "quiet")


def _legend(root: ET.Element, y: float) -> None:
    x = FIRST
    for depth in range(DEPTHS):
        block = group(root, f"a{depth}")
        rect(block, x + depth * 24, y - 13, SPAN, 18)
        text(block, x + depth * 24 + SPAN / 2, y, str(depth), "small mid")
    text(root, x + 104, y, f"a chunk, {CHUNK} rows, in pass 0 to {DEPTHS - 1}", "quiet")
    rect(root, x + 334, y - 12.5, SPAN - 1, 17, "empty")
    text(root, x + 364, y, "padding", "quiet")
    _badge(root, x + 460, y - 4, "A")
    text(root, x + 476, y, "first token of A", "quiet")
