"""The pictures of the documentation, drawn from plans of the real scheduler: ``python -m tools.pictures``.

Each picture is a function of a `Palette` that gives the text of an SVG: no script, no font, no file beside it.
The files in ``docs/images`` are what they give now; a test compares them.
"""

from collections.abc import Callable

from tools.pictures.palette import DARK, LIGHT, Palette
from tools.pictures.race import race
from tools.pictures.staircase import staircase

PICTURES: dict[str, Callable[[Palette], str]] = {"staircase": staircase, "wavefront": race}


def files() -> dict[str, str]:
    """The content of every file by its name: each picture for a light and for a dark page."""
    return {f"{name}-{palette.name}.svg": draw(palette) for name, draw in PICTURES.items() for palette in (LIGHT, DARK)}
