"""A thin layer over `xml.etree.ElementTree` for drawing. Lengths are pixels where the picture is not scaled."""

import xml.etree.ElementTree as ET
from collections.abc import Sequence

WIDTH = 830
"""Of GitHub's column of text."""

FONT = 'system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif'

BASE = [
    f"text{{font:13px {FONT}}}",
    ".big{font-size:15px;font-weight:600}",
    ".small{font-size:11px}",
    ".mid{text-anchor:middle}",
    ".end{text-anchor:end}",
]
"""Rules that all pictures share. Colours are the palette's."""


def drawing(height: int, title: str, rules: Sequence[str]) -> ET.Element:
    """An empty picture on a page of its own, so that it can be read wherever it is opened."""
    root = ET.Element(
        "svg",
        {
            "xmlns": "http://www.w3.org/2000/svg",
            "viewBox": f"0 0 {WIDTH} {height}",
            "width": str(WIDTH),
            "height": str(height),
            "role": "img",
        },
    )
    ET.SubElement(root, "title").text = title
    ET.SubElement(root, "style").text = "\n" + "\n".join([*BASE, *rules]) + "\n"
    rect(root, 0, 0, WIDTH, height, "page", radius=8)
    return root


def written(root: ET.Element) -> str:
    """The text of a picture."""
    ET.indent(root, " ")
    return ET.tostring(root, encoding="unicode") + "\n"


def group(parent: ET.Element, names: str) -> ET.Element:
    """A group whose members take their look from its classes."""
    return ET.SubElement(parent, "g", {"class": names} if names else {})


def rect(
    parent: ET.Element, x: float, y: float, width: float, height: float, names: str = "", radius: float = 2
) -> ET.Element:
    """A rectangle with its upper left corner at (x, y)."""
    sizes = {"x": x, "y": y, "width": width, "height": height, "rx": radius}
    return _add(parent, "rect", names, {key: _number(value) for key, value in sizes.items()})


def circle(parent: ET.Element, x: float, y: float, radius: float, names: str = "") -> ET.Element:
    """A circle round (x, y)."""
    return _add(parent, "circle", names, {"cx": _number(x), "cy": _number(y), "r": _number(radius)})


def text(parent: ET.Element, x: float, y: float, words: str, names: str = "") -> ET.Element:
    """A line of words on the baseline y; x is its start, or its middle or end with the class ``mid`` or ``end``."""
    line = _add(parent, "text", names, {"x": _number(x), "y": _number(y)})
    line.text = words
    return line


def path(parent: ET.Element, parts: Sequence[str | float], names: str = "") -> ET.Element:
    """A path of commands and coordinates."""
    return _add(parent, "path", names, {"d": " ".join(p if isinstance(p, str) else _number(p) for p in parts)})


def _add(parent: ET.Element, tag: str, names: str, attributes: dict[str, str]) -> ET.Element:
    return ET.SubElement(parent, tag, ({"class": names} if names else {}) | attributes)


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")
