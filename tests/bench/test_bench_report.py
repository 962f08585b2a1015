"""The page of benchmarks: every figure is on it, and a browser shows it without a word and without the network."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from wavegraph.bench.report import report_html
from wavegraph.cli import main
from wavegraph.errors import ConfigError

CHROMIUM = shutil.which("chromium")

TIMES = {"median": 12.5, "low": 10.25, "high": 20.0}
FACTS = {"cpu": "a <b>CPU", "threads": 2, "commit": "abc123"}

PREFILL = {
    **FACTS,
    "benchmark": "prefill",
    "shape": {"hidden": 64},
    "cost": {"core": {"rows": [1]}},
    "workloads": [
        {
            "workload": "rfc",
            "requests": 4,
            "variants": [
                {"chunk": 16, "wavefront": True, "ms": TIMES, "padding": 0.125},
                {"chunk": "auto", "wavefront": False, "ms": {"median": 5.0, "low": 5.0, "high": 5.0}, "padding": 0.0},
            ],
        }
    ],
}
DECODE = {
    **FACTS,
    "benchmark": "decode",
    "loads": [{"beside": "none", "itl_ms": {"p50": 3.0, "p90": 4.0, "p99": 6.0}, "tokens_per_s": 1234.5}],
}


def written(tmp_path: Path, *results: dict[str, Any]) -> list[str]:
    files = [tmp_path / f"{index}.json" for index in range(len(results))]
    for file, result in zip(files, results, strict=True):
        file.write_text(f"a table\n{json.dumps(result)}\n")
    return [str(file) for file in files]


def test_every_figure_is_on_the_page(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    done = CliRunner().invoke(main, ["bench", "report", *written(tmp_path, PREFILL, DECODE), "--html", str(page)])
    assert (done.exit_code, done.stdout) == (0, "")
    text = page.read_text()
    for words in (
        "a &lt;b&gt;CPU",
        "workload rfc, requests 4",
        "hidden 64",
        "commit abc123",
        '<td class="number">12.5%</td>',
        "auto",
    ):
        assert words in text, words
    assert "12.5 <small>10.25 to 20</small>" in text
    assert '<i style="width:62.5%"></i><b style="left:51.2%;width:48.8%">' in text
    assert '<i style="width:25.0%"></i><b style="left:25.0%;width:0.0%">' in text  # one scale in a table
    assert "3 <small>p90 4, p99 6</small>" in text
    assert "1,234" in text
    assert text.index("Prompts by chunk size") < text.index("Gaps between tokens, and")
    for word in ("<script", "src=", "@import", "url(", "http"):
        assert word not in text, word


def test_a_benchmark_that_it_does_not_know_is_shown_too() -> None:
    text = report_html([{"benchmark": "novel", "rows": [{"speed": 3}], "empty": []}])
    assert "<h2>novel</h2>" in text
    assert "<th>speed</th>" in text


@pytest.mark.parametrize("text", ["", "no json", "[1]", '{"steps": 3}'])
def test_a_file_that_holds_no_result_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "result.json"
    file.write_text(text)
    done = CliRunner().invoke(main, ["bench", "report", str(file), "--html", str(tmp_path / "page.html")])
    assert done.exit_code == ConfigError.exit_code
    assert f"{file}: holds no result of a benchmark" in done.stderr
    assert not (tmp_path / "page.html").exists()


def test_a_page_that_cannot_be_written(tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["bench", "report", *written(tmp_path, DECODE), "--html", str(tmp_path)])
    assert done.exit_code == 2
    assert "cannot be written" in done.stderr


@pytest.mark.skipif(CHROMIUM is None, reason="needs a chromium on the path to open the page in")
def test_a_browser_shows_it_silently(tmp_path: Path) -> None:
    driver = pytest.importorskip("playwright.sync_api")
    page_file = tmp_path / "page.html"
    page_file.write_text(report_html([PREFILL, DECODE]))
    with driver.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1240, "height": 900})
        said: list[str] = []
        asked: list[str] = []
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(page_file.as_uri())
        widths = page.eval_on_selector_all(".bar i", "bars => bars.map(bar => bar.getBoundingClientRect().width)")
        page.set_viewport_size({"width": 420, "height": 800})
        sideways = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        browser.close()
    assert said == []
    assert asked == [page_file.as_uri()]
    assert widths[0] == pytest.approx(2.5 * widths[1], rel=0.02)
    assert widths[1] > 30
    assert sideways <= 0
