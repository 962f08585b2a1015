"""Colours of the pictures, for a light and for a dark page.

Hue is the request, and the distance from the page's own colour the depth. The hues are blue, amber and rose: at each
depth they differ under protanopia, deuteranopia and tritanopia. Tests measure that, and that text on them stands out.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Palette:
    """Colours as ``#rrggbb``. ``shades[request][depth]`` fills a task; ``inks[depth]`` is for text on it.

    ``text`` and ``quiet`` are for words, ``line`` for outlines of what is empty, ``done`` fills what is past.
    """

    name: str
    page: str
    text: str
    quiet: str
    line: str
    done: str
    shades: tuple[tuple[str, ...], ...]
    inks: tuple[str, ...]

    def css(self, families: Sequence[str]) -> list[str]:
        """Rules for the classes of the pictures; ``a0`` is a group of request A at depth 0."""
        rules = [
            f".page{{fill:{self.page}}}",
            f"text{{fill:{self.text}}}",
            f".quiet{{fill:{self.quiet}}}",
            f".done{{fill:{self.done}}}",
            f".rule{{stroke:{self.line}}}",
            f".empty{{fill:none;stroke:{self.line};stroke-dasharray:2 2}}",
            f".now{{fill:none;stroke:{self.text};stroke-width:1.5}}",
        ]
        for family, shades in zip(families, self.shades, strict=True):
            for depth, (shade, ink) in enumerate(zip(shades, self.inks, strict=True)):
                rules.append(f".{family}{depth}{{fill:{shade}}}")
                rules.append(f".{family}{depth} text{{fill:{ink}}}")
        return rules


LIGHT = Palette(
    "light",
    page="#ffffff",
    text="#1f2328",
    quiet="#59636e",
    line="#afb8c1",
    done="#dfe3e8",
    shades=(
        ("#c2defd", "#7dbdfe", "#3690e3", "#065da0"),
        ("#f4dfb4", "#e0b861", "#b88a06", "#7a5b07"),
        ("#eebbc3", "#e5889a", "#c4506c", "#84253f"),
    ),
    inks=("#1f2328", "#1f2328", "#000000", "#ffffff"),
)

DARK = Palette(
    "dark",
    page="#0d1117",
    text="#f0f6fc",
    quiet="#9198a1",
    line="#4a535e",
    done="#2a313a",
    shades=(
        ("#0c3a62", "#185a95", "#3284d0", "#73b6fa"),
        ("#5c4302", "#84630b", "#b78a0f", "#e8be62"),
        ("#581f2d", "#883549", "#c0546d", "#ee8d9f"),
    ),
    inks=("#f0f6fc", "#f0f6fc", "#000000", "#0d1117"),
)
