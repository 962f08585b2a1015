"""The pictures of the pages are what their script draws now, and can be read."""

import html
import itertools
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from tools.pictures import PICTURES, files
from tools.pictures.palette import DARK, LIGHT, Palette
from tools.pictures.race import PROMPTS, runs
from tools.pictures.steps import BUCKET, CHUNK, DEPTHS
from wavegraph.buckets.ladder import Ladder
from wavegraph.scheduler.config import SchedulerConfig
from wavegraph.study.simulate import simulate
from wavegraph.study.workload import Workload

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "images"
PLACES = {"staircase": "docs/architecture.md", "wavefront": "README.md"}
COLOUR = re.compile(r"#[0-9a-f]{6}\b")

# Machado, Oliveira and Fernandes (2009), severity 1, on linear RGB.
SIGHTS = {
    "usual": ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)),
    "protanopia": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deuteranopia": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "tritanopia": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
}

palettes = pytest.mark.parametrize("palette", [LIGHT, DARK], ids=lambda palette: palette.name)
drawn = pytest.mark.parametrize("name", sorted(files()))


def test_the_committed_files_are_what_the_script_draws() -> None:
    assert {path.name: path.read_text(encoding="utf-8") for path in FOLDER.iterdir()} == files(), "make pictures"


@drawn
def test_a_picture_needs_nothing_beside_it(name: str) -> None:
    """A page shows it as an image: no script runs in it and nothing is loaded."""
    text = files()[name]
    tags = {element.tag.rpartition("}")[2] for element in ET.fromstring(text).iter()}
    assert tags <= {"svg", "title", "style", "g", "rect", "circle", "path", "text", "clipPath"}
    assert re.findall(r"https?:[^\"]*", text) == ["http://www.w3.org/2000/svg"]
    assert not re.search(r"@import|@font-face|href", text)
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", text))


@drawn
def test_every_class_has_its_rule(name: str) -> None:
    root = ET.fromstring(files()[name])
    style = root.findtext("{*}style") or ""
    used = {word for element in root.iter() for word in element.get("class", "").split()}
    assert used == {word for word in used if f".{word}{{" in style or f".{word} " in style}
    assert set(re.findall(r"animation-name:(\w+)", style)) == set(re.findall(r"@keyframes (\w+)", style))


@pytest.mark.parametrize("name", PICTURES)
def test_the_variants_differ_in_colours_alone(name: str) -> None:
    light, dark = (files()[f"{name}-{palette.name}.svg"] for palette in (LIGHT, DARK))
    assert light != dark
    assert COLOUR.sub("", light) == COLOUR.sub("", dark)


@pytest.mark.parametrize("name", PICTURES)
def test_the_page_says_in_words_what_the_picture_shows(name: str) -> None:
    (words,) = re.findall(rf'<img src="[^"]*{name}-light\.svg"[^>]* alt="([^"]*)"', (ROOT / PLACES[name]).read_text())
    assert html.unescape(words) == ET.fromstring(files()[f"{name}-light.svg"]).findtext("{*}title")


def test_nothing_moves_for_who_asked_for_less_motion() -> None:
    before, _, moving = files()["wavefront-light.svg"].partition("@media (prefers-reduced-motion:no-preference){")
    assert "animation-name" in moving
    assert "animation" not in before


def test_the_counts_are_those_of_the_simulator() -> None:
    workload = Workload.at_once("the picture's", PROMPTS.values())
    for run, wavefront in zip(runs(), (False, True), strict=True):
        config = SchedulerConfig(
            depths=DEPTHS,
            page_size=16,
            num_pages=64,
            max_model_len=workload.longest,
            max_num_seqs=len(PROMPTS),
            max_num_batched_tokens=BUCKET,
            prefill_chunk_size=CHUNK,
            packing="fill",
            wavefront=wavefront,
        )
        result = simulate(workload, config, ladder=Ladder([BUCKET]), check=True)
        assert (len(run.steps), run.empty) == (result.steps, f"{result.padding:.0%}")


def linear(colour: str) -> list[float]:
    """``#rrggbb`` as linear RGB."""
    values = [int(colour[index : index + 2], 16) / 255 for index in (1, 3, 5)]
    return [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in values]


def contrast(one: str, other: str) -> float:
    """As WCAG 2 has it, 1 to 21."""
    weights = (0.2126, 0.7152, 0.0722)
    lights = [sum(w * value for w, value in zip(weights, linear(each), strict=True)) + 0.05 for each in (one, other)]
    return max(lights) / min(lights)


def oklab(colour: str, sight: str) -> list[float]:
    """Where a colour is in Oklab for eyes of a kind; distances there are differences that one sees."""

    def times(matrix: tuple[tuple[float, ...], ...], vector: list[float]) -> list[float]:
        return [sum(a * b for a, b in zip(row, vector, strict=True)) for row in matrix]

    seen = [min(max(value, 0.0), 1.0) for value in times(SIGHTS[sight], linear(colour))]
    cones = times(
        (
            (0.4122214708, 0.5363325363, 0.0514459929),
            (0.2119034982, 0.6806995451, 0.1073969566),
            (0.0883024619, 0.2817188376, 0.6299787005),
        ),
        seen,
    )
    return times(
        (
            (0.2104542553, 0.7936177850, -0.0040720468),
            (1.9779984951, -2.4285922050, 0.4505937099),
            (0.0259040371, 0.7827717662, -0.8086757660),
        ),
        [value ** (1 / 3) for value in cones],
    )


@palettes
def test_words_stand_out(palette: Palette) -> None:
    pairs = [(palette.text, palette.page), (palette.quiet, palette.page)]
    pairs += [(ink, shade) for shades in palette.shades for ink, shade in zip(palette.inks, shades, strict=True)]
    assert [(pair, contrast(*pair)) for pair in pairs if contrast(*pair) < 4.5] == []


@palettes
@pytest.mark.parametrize("sight", SIGHTS)
def test_requests_and_depths_are_told_apart(palette: Palette, sight: str) -> None:
    def distance(one: str, other: str) -> float:
        places = zip(oklab(one, sight), oklab(other, sight), strict=True)
        return sum((a - b) ** 2 for a, b in places) ** 0.5

    pairs = [pair for depth in zip(*palette.shades, strict=True) for pair in itertools.combinations(depth, 2)]
    pairs += [pair for shades in palette.shades for pair in itertools.pairwise(shades)]
    assert [(pair, distance(*pair)) for pair in pairs if distance(*pair) < 0.07] == []
