"""The dashboard in a real browser, under load: drawn, moving, and silent."""

import asyncio
import json
import os
import random
import re
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest

from tests.server.harness import SETTINGS, Served, serving
from wavegraph.config import EngineConfig
from wavegraph.sampling import SamplingParams
from wavegraph.server.async_engine import AsyncEngine

playwright = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Debian's chromium"),
]

CONFIG = EngineConfig(max_num_batched_tokens=128, prefill_chunk_size=16, max_num_seqs=8, num_pages=200)


async def load(engine: AsyncEngine) -> None:
    """Requests without end: twice as many as fit."""

    async def client(seed: int) -> None:
        draw = random.Random(seed)
        while True:
            prompt = [draw.randrange(1, 200) for _ in range(draw.randrange(20, 300))]
            params = SamplingParams(max_tokens=draw.randrange(5, 60), ignore_eos=True)
            generation = await engine.generate([prompt], params)
            try:
                await generation.finished()
            finally:
                generation.close()

    await asyncio.gather(*map(client, range(16)))


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with serving(config=CONFIG) as running:
        running.do(running.engine.ready())
        future: Future[None] = asyncio.run_coroutine_threadsafe(load(running.engine), running._loop)
        yield running
        assert not future.done()
        future.cancel()


@pytest.fixture(scope="module")
def browser() -> Iterator["playwright.Browser"]:
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


def wait_until(page: "playwright.Page", expression: str, seconds: float = 60) -> None:
    """Poll: the page's own policy forbids what `wait_for_function` does."""
    end = time.monotonic() + seconds
    while not page.evaluate(expression):
        assert time.monotonic() < end, f"still not so: {expression}"
        page.wait_for_timeout(50)


# Pixels of the wavefront in the colours of prompt rows, decode rows and padding.
DRAWN = """() => {
  const canvas = document.getElementById("wave");
  const copy = new OffscreenCanvas(canvas.width, canvas.height).getContext("2d", {willReadFrequently: true});
  copy.drawImage(canvas, 0, 0);
  const pixels = copy.getImageData(0, 0, canvas.width, canvas.height).data;
  const seen = new Map();
  for (let i = 0; i < pixels.length; i += 4) {
    const color = pixels.slice(i, i + 3).join(",");
    seen.set(color, (seen.get(color) || 0) + 1);
  }
  const wanted = ["prompt", "decode", "pad"].map((name) => {
    const hex = colors[name].slice(1);
    return [0, 2, 4].map((at) => parseInt(hex.slice(at, at + 2), 16)).join(",");
  });
  return wanted.map((color) => seen.get(color) || 0);
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_draws_and_moves_under_load(server: Served, browser: "playwright.Browser", scheme: str) -> None:
    page = browser.new_page(viewport={"width": 1360, "height": 1100}, color_scheme=scheme)
    said: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: said.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(f"{server.url}/dashboard")
    wait_until(page, "points.length > 3 && columns.length > 200")
    assert page.inner_text("#state") == "live"
    assert SETTINGS.model_name in page.inner_text("#facts")
    wait_until(page, f"({DRAWN})().every((pixels) => pixels > 50)")
    picture = "document.getElementById('wave').toDataURL()"
    before = page.evaluate(picture)
    wait_until(page, f"{picture} !== {json.dumps(before)}", 10)
    for tile in ("output", "prompt", "ttft", "itl", "rows", "padding", "pages"):
        assert any(digit.isdigit() for digit in page.inner_text(f"#t-{tile}")), tile
    assert re.fullmatch(r"why: .+ \d+ %", page.inner_text("#reasons"))
    assert page.locator(".uplot canvas").count() == 5
    assert page.evaluate("plots['c-tokens'].data[1].filter((rate) => rate > 0).length") > 2
    page.click("#pause")
    page.wait_for_timeout(200)
    before = page.evaluate(picture)
    page.wait_for_timeout(500)
    assert page.evaluate(picture) == before, "paused"
    page.hover("#wave", position={"x": 1000, "y": 50})
    assert "depth 3" in page.inner_text("#tip")
    page.click("#theme")
    page.click("#pause")
    wait_until(page, f"({DRAWN})().every((pixels) => pixels > 50)")
    if "WAVEGRAPH_SCREENSHOTS" in os.environ:
        page.screenshot(path=Path(os.environ["WAVEGRAPH_SCREENSHOTS"], f"dashboard-{scheme}.png"), full_page=True)
    page.close()
    assert said == []
    assert {url.split("?")[0] for url in asked} == {f"{server.url}/dashboard", f"{server.url}/dashboard/events"}


def test_a_small_screen_scrolls_one_way_only(server: Served, browser: "playwright.Browser") -> None:
    page = browser.new_page(viewport={"width": 390, "height": 800})
    page.goto(f"{server.url}/dashboard")
    wait_until(page, "points.length > 1")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.close()


def test_a_server_that_goes_away_is_said_so(browser: "playwright.Browser") -> None:
    page = browser.new_page()
    with serving(config=CONFIG) as running:
        running.do(running.engine.ready())
        page.goto(f"{running.url}/dashboard")
        wait_until(page, "points.length > 1")
        running.do(running.engine.close())
        wait_until(page, "document.getElementById('state-text').innerText.includes('retrying')", 10)
    page.close()
