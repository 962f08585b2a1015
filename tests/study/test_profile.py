"""``profile-buckets`` on a small model: what is measured is real, the report draws, the result goes into a bundle."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from wavegraph.buckets.cost import CostModel, ProgramCost
from wavegraph.buckets.ladder import Ladder
from wavegraph.buckets.samples import Point, Samples
from wavegraph.capture.bundle import add_cost, read_bundle
from wavegraph.cli import main
from wavegraph.config import EngineConfig
from wavegraph.engine.engine import Engine
from wavegraph.errors import BundleError, ConfigError
from wavegraph.llm import LLM
from wavegraph.model.loading import load_model
from wavegraph.sampling import SamplingParams
from wavegraph.startup.precompile import precompile
from wavegraph.study.bucket_probe import BucketProbe
from wavegraph.study.profile import Budget, Schedule, Subject, recommend
from wavegraph.study.simulate import attended_positions
from wavegraph.study.workload import Workload

TINY = str(Path(__file__).parents[1] / "goldens" / "tiny")
CHROMIUM = shutil.which("chromium")
OPTIONS = ["--max-batched-tokens", "40", "--max-num-seqs", "6", "--candidates", "1,16", "--contexts", "32,64"]
SMALL = EngineConfig(max_num_batched_tokens=40, max_num_seqs=6)


@pytest.fixture(autouse=True)
def _small_machine_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wavegraph.study.measure.READ_BYTES", 1 << 16)
    monkeypatch.setattr("wavegraph.study.measure.MATRIX_SIZE", 32)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["profile-buckets", *arguments])


@pytest.fixture(scope="module")
def workload(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few requests over time: prompts, then decode rows, of up to 60 tokens."""
    path = tmp_path_factory.mktemp("workload") / "few.jsonl"
    lines = [{"arrival": i * 1e-3, "prompt_tokens": 5 + 7 * i, "output_tokens": 4 + i} for i in range(6)]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


@pytest.fixture(scope="module")
def profiled(workload: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of a run, and its output."""
    out = tmp_path_factory.mktemp("profile") / "out"
    result = run(TINY, *OPTIONS, "--workload", str(workload), "--max-graphs", "4", "--out", str(out))
    assert result.exit_code == 0, result.output
    return out, result.stdout


def result_of(profiled: tuple[Path, str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((profiled[0] / "profile.json").read_text())
    return found


# -- replays of an engine ----------------------------------------------------------------------------------


@pytest.fixture
def probe() -> BucketProbe:
    subject = Subject.find(TINY, SMALL, contexts=[48, 64], candidates=[1, 16, 24])
    model = load_model(TINY, ops=subject.runner.ops, max_model_len=64)
    return BucketProbe(Engine(model, subject.sizes(), backend=subject.runner.backend), [48, 64])


def test_a_point_is_spans_at_the_end_of_its_context(probe: BucketProbe) -> None:
    executor = probe._executor
    assert executor.core.ladder.sizes == (1, 16, 24, 40)
    assert probe.prepare(Point("core", 40, 48)) == 16 * 32 * 2 + 2 * 136 + 8 * 40 + 36
    assert executor.io.span_start[:3].tolist() == [32, 32, 40]
    assert executor.io.span_count.tolist()[:4] == [16, 16, 8, 0]
    before = executor.pools.hidden.clone()
    probe.replay(Point("core", 40, 48))
    written = (executor.pools.hidden != before).any(-1)
    assert int(written.sum()) == 40  # each row in a page of its own request
    assert executor.core.stats.hits[40] == 1
    # A smaller point leaves nothing of the larger one.
    assert probe.prepare(Point("core", 1, 64)) == 64
    before = executor.pools.hidden.clone()
    probe.replay(Point("core", 1, 64))
    assert int((executor.pools.hidden != before).any(-1).sum()) == 1


def test_positions_are_counted_as_the_simulation_counts_them(probe: BucketProbe) -> None:
    executor = probe._executor
    positions = probe.prepare(Point("core", 24, 64))

    class Plan:
        span_start = executor.io.span_start.tolist()
        span_count = executor.io.span_count.tolist()

    assert positions == attended_positions(Plan)  # type: ignore[arg-type]


def test_coda_rows_are_drawn(probe: BucketProbe) -> None:
    executor = probe._executor
    assert probe.prepare(Point("coda", 6, 0)) == 0
    executor.io.coda_token.fill_(-7)
    probe.replay(Point("coda", 6, 0))
    assert (executor.io.coda_token[:6] >= 0).all()


def test_the_host_is_timed_before_the_pools_are_filled(probe: BucketProbe) -> None:
    seconds = probe.host_seconds()
    assert len(seconds) > 10
    assert all(0 < each < 10 for each in seconds)
    captured = {(each.program, each.rows): each for each in probe.captured()}
    assert {rows for program, rows in captured if program == "core"} == {1, 16, 24, 40}
    assert captured["core", 40].nodes > 10
    assert captured["core", 40].seconds > 0


@pytest.mark.parametrize(
    ("contexts", "words"),
    [([80], "need 3 slots and 15 pages, but the engine has 6 and 12"), ([8], "8 cannot end a span of 16 rows")],
)
def test_contexts_that_do_not_fit_are_refused(probe: BucketProbe, contexts: list[int], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        BucketProbe(probe._engine, contexts)


# -- the command -------------------------------------------------------------------------------------------


def test_every_candidate_is_measured_at_every_context(profiled: tuple[Path, str]) -> None:
    found, table = result_of(profiled), profiled[1]
    assert [bucket["rows"] for bucket in found["core"]] == [1, 16, 40]
    for bucket in found["core"]:
        assert [replay["context"] for replay in bucket["replays"]] == [32, 64]
        assert all(0 < replay["low"] <= replay["median"] <= replay["high"] for replay in bucket["replays"])
        assert bucket["capture_seconds"] > 0
    assert [bucket["rows"] for bucket in found["coda"]] == [1, 2, 4, 6]
    assert found["rates"].keys() == {"read_gbs", "matrix_tflops"}
    cost = CostModel.from_file(profiled[0] / "profile.json")
    assert cost.measured
    assert cost.core.rows == (1, 16, 40)
    assert cost.host_seconds > 0
    assert f"ladder     {','.join(map(str, found['ladder']))}" in table
    assert "SGLang" in table
    assert "few.jsonl: 6 requests" in table


def test_the_ladder_is_for_the_rows_that_the_scheduler_wants(profiled: tuple[Path, str], workload: Path) -> None:
    found = result_of(profiled)
    histogram = {int(rows): steps for rows, steps in found["workload"]["histogram"].items()}
    tokens = [(5 + 7 * i, 4 + i) for i in range(6)]
    depths = found["model.total_ut_steps"]
    assert sum(rows * steps for rows, steps in histogram.items()) == depths * sum(p + n - 1 for p, n in tokens)
    assert sum(histogram.values()) == found["workload"]["steps"]
    assert max(histogram) <= 40
    assert found["ladder"][-1] == 40
    assert len(found["ladder"]) <= 4
    ours, *others = found["ladders"]
    assert ours["sizes"] == found["ladder"]
    assert {each["name"] for each in others} >= {"vLLM", "SGLang", "TensorRT-LLM", "powers of two"}
    for each in found["ladders"]:
        assert each["scheduled_steps"] > 0
        assert each["scheduled_seconds"] > 0
        assert 0 <= each["scheduled_padding"] < 1
    assert found["robust"]["held_out_seconds"] >= found["robust"]["fitted_seconds"] > 0


def test_a_second_run_measures_nothing_and_says_the_same(
    profiled: tuple[Path, str], workload: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = result_of(profiled)
    monkeypatch.setattr("wavegraph.study.profile.load_model", None)  # would be called
    arguments = [TINY, *OPTIONS, "--workload", str(workload), "--max-graphs", "4", "--out", str(profiled[0])]
    again = run(*arguments, "--json", "-")
    assert again.exit_code == 0, again.output
    assert json.loads(again.stdout) == before == result_of(profiled)


def test_ctrl_c_leaves_what_was_measured(workload: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replay, calls = BucketProbe.replay, 0

    def interrupted(self: BucketProbe, point: Point) -> None:
        nonlocal calls
        calls += 1
        if calls == 40:
            raise KeyboardInterrupt
        replay(self, point)

    arguments = [TINY, *OPTIONS, "--workload", str(workload), "--out", str(tmp_path)]
    with monkeypatch.context() as patch:
        patch.setattr(BucketProbe, "replay", interrupted)
        stopped = run(*arguments)
    assert stopped.exit_code == 130
    assert f"is in {tmp_path / 'samples.jsonl'}; the same command goes on" in stopped.stderr
    assert not (tmp_path / "profile.json").exists()
    kept = len((tmp_path / "samples.jsonl").read_text().splitlines())
    assert kept > 5
    assert run(*arguments).exit_code == 0
    lines = (tmp_path / "samples.jsonl").read_text().splitlines()
    visits = [
        (each["program"], each["rows"], each["context"], each["round"])
        for each in map(json.loads, lines)
        if "round" in each
    ]
    assert len(visits) == len(set(visits)) == 3 * (3 * 2 + 4)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--workload", "nothing"], "workload: 'nothing' is neither a file nor one of"),
        (["--contexts", "8"], "contexts: 8 cannot end a span of 16 rows"),
        (["--contexts", "9999999"], "max_model_len=9999999 exceeds the model's"),
        (["--contexts", ""], "contexts: must be at least one"),
        (["--candidates", "64"], "buckets: 64 can never run"),
        (["--candidates", "0"], "bucket sizes are row counts of at least 1, got 0"),
        (["--backend", "fast"], "backend: 'fast' is unknown"),
        (["--dtype", "int8"], "dtype: must be auto"),
        (["--max-capture-seconds", "0"], "max_capture_seconds: 0 is less than the top bucket"),
        (["--chunk", "0"], "prefill_chunk_size"),
    ],
)
def test_what_cannot_be_is_refused(arguments: list[str], named: str, tmp_path: Path, workload: Path) -> None:
    result = run(TINY, *OPTIONS, "--workload", str(workload), "--out", str(tmp_path), *arguments)
    assert result.exit_code == 2, result.output
    assert named in result.stderr
    assert result.stdout == ""


def test_samples_of_another_model_are_refused(profiled: tuple[Path, str], workload: Path) -> None:
    other = str(Path(TINY).parent / "tiny_gqa")
    result = run(other, *OPTIONS, "--workload", str(workload), "--out", str(profiled[0]))
    assert result.exit_code == 2
    assert "was measured under other conditions (model.num_key_value_heads: " in result.stderr
    assert result_of(profiled)  # as it was


def test_a_bucket_costs_what_was_measured_before(tmp_path: Path) -> None:
    """What is measured is the model's own work: CORE at 40 rows takes longer than at 1, and the fit knows it."""
    subject = Subject.find(TINY, SMALL, contexts=[64], candidates=[1])
    cost = subject.measure(Samples(tmp_path / "samples.jsonl", subject.fingerprint())).cost()
    assert cost.core.replay(40) > cost.core.replay(1) > 0
    assert cost.coda is not None
    assert torch.get_num_threads() == subject.fingerprint()["threads"]
    plans = subject.schedule(Workload.at_once("two", [30, 30], 3), cost)
    assert sum(plans.rows) == subject.shape.total_ut_steps * 64
    assert plans.padding == 0
    assert plans.seconds > len(plans.rows) * cost.host_seconds
    padded = subject.schedule(Workload.at_once("two", [30, 30], 3), cost, Ladder([40]))
    assert padded.padding == 1 - sum(padded.rows) / (40 * len(padded.rows))
    assert padded.seconds > plans.seconds


@pytest.mark.parametrize("helps", [True, False])
def test_the_fastest_bucket_gets_a_place_if_the_scheduler_does_better_with_it(
    helps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """12 rows a step are the most rows a second, and no step wants them."""
    rows = (1, 11, 12, 13, 40)
    cost = CostModel(ProgramCost(rows, (1.0, 1.5, 1.5, 3.0, 8.0), (0.1,) * 5, (10, 11, 12, 13, 40)), source="a test")
    subject = Subject.find(TINY, SMALL, contexts=[64], candidates=[1])

    def schedule(self: Subject, workload: Workload, cost: CostModel, ladder: Ladder) -> Schedule:
        return Schedule((), 1.0 + ((12 in ladder.sizes) != helps), 0.0)

    monkeypatch.setattr(Subject, "schedule", schedule)
    workload, wanted = Workload.at_once("", [1]), [30, 40] * 16

    def sizes(budget: Budget) -> tuple[int, ...]:
        return recommend(subject, wanted, cost, workload, budget).ladder.sizes

    assert sizes(Budget(3)) == ((12, 30, 40) if helps else (30, 40))
    assert sizes(Budget(2)) == ((12, 40) if helps else (30, 40))
    assert sizes(Budget(1)) == (40,)
    assert sizes(Budget(3, max_bytes=72)) == ((12, 40) if helps else (30, 40))
    assert sizes(Budget(3, max_bytes=50)) == (40,)
    assert sizes(Budget(3, max_capture_seconds=0.15)) == (40,)


# -- bundles -----------------------------------------------------------------------------------------------


def test_the_result_goes_into_a_bundle(profiled: tuple[Path, str], workload: Path, tmp_path: Path) -> None:
    bundle, found = tmp_path / "bundle", result_of(profiled)
    arguments = [TINY, *OPTIONS, "--workload", str(workload), "--max-graphs", "4", "--out", str(profiled[0])]
    assert run(*arguments, "--bundle", str(bundle)).exit_code == 0
    cost = CostModel.from_dict(found["cost"])
    assert read_bundle(bundle).cost == cost
    assert list(read_bundle(bundle).ladder.sizes) == found["ladder"]
    # Only with measured costs may a target be set.
    with LLM(TINY, EngineConfig(max_num_seqs=6, max_model_len=64, target_itl_ms=100), bundle=bundle) as llm:
        assert llm.engine.scheduler.cost == cost
        assert llm.generate([1, 2, 3], SamplingParams(max_tokens=4, ignore_eos=True))[0].finished
        assert list(llm.engine.sizes.ladder.sizes) == found["ladder"]
    with LLM(TINY, EngineConfig(max_num_seqs=6, max_model_len=64), bundle=bundle, cost=CostModel.assumed(40)) as llm:
        assert llm.engine.scheduler.cost == CostModel.assumed(40)


def test_a_profile_goes_into_a_bundle_by_precompile(profiled: tuple[Path, str], tmp_path: Path) -> None:
    profile, found = str(profiled[0] / "profile.json"), result_of(profiled)
    make = ["precompile", TINY, "--out", str(tmp_path / "bundle"), "--profile"]
    assert CliRunner().invoke(main, [*make, profile]).exit_code == 0
    assert list(read_bundle(tmp_path / "bundle").ladder.sizes) == found["ladder"]
    assert read_bundle(tmp_path / "bundle").cost == CostModel.from_dict(found["cost"])
    assert CliRunner().invoke(main, [*make, profile, "--ladder", "2,8"]).exit_code == 0
    assert read_bundle(tmp_path / "bundle").ladder.sizes == (2, 8)
    assert read_bundle(tmp_path / "bundle").cost is not None
    result = CliRunner().invoke(main, [*make, str(tmp_path / "none.json")])
    assert result.exit_code == 2
    assert "cost model" in result.stderr


def test_costs_in_a_bundle_are_checked_like_all_of_it(tmp_path: Path) -> None:
    folder = tmp_path / "bundle"
    plain = precompile(TINY, folder, ladder=[8])
    assert plain.cost is None
    assert add_cost(folder, CostModel.assumed(8)).cost == CostModel.assumed(8)
    assert add_cost(folder, CostModel.assumed(4)).cost == CostModel.assumed(4)  # in place of the first
    assert read_bundle(folder).fingerprint == plain.fingerprint
    assert not [path for path in tmp_path.iterdir() if path != folder]
    content = bytearray((folder / "files/cost.json").read_bytes())
    content[30] ^= 1
    (folder / "files/cost.json").write_bytes(content)
    with pytest.raises(BundleError, match=r"files/cost.json is not what was written"):
        read_bundle(folder)
    with pytest.raises(BundleError, match=r"files/cost.json is not what was written"):
        add_cost(folder, CostModel.assumed(8))


# -- the page ----------------------------------------------------------------------------------------------

DRAWN = """canvas => {
  const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  let colored = 0;
  for (let i = 0; i < pixels.length; i += 4) {
    const [red, green, blue, alpha] = pixels.slice(i, i + 4);
    if (alpha > 100 && Math.max(red, green, blue) - Math.min(red, green, blue) > 40) colored++;
  }
  return colored;
}"""
"""Pixels of a canvas that are not grey: those of lines and bars, not of axes."""


def test_the_page_holds_all_that_it_needs(profiled: tuple[Path, str]) -> None:
    page = (profiled[0] / "report.html").read_text()
    assert "<title>Buckets of tiny</title>" in page
    assert "MIT licence" in page
    assert "$" not in page.split("<body>")[1].split("<script")[0]  # every placeholder is filled
    for word in ("src=", "@import", "url(", "fetch(", "XMLHttpRequest"):
        assert word not in page, word


@pytest.mark.skipif(CHROMIUM is None, reason="needs a chromium on the path to open the page in")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_draws_its_charts_silently(profiled: tuple[Path, str], scheme: str) -> None:
    driver = pytest.importorskip("playwright.sync_api")
    page_file = (profiled[0] / "report.html").as_uri()
    with driver.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1240, "height": 900}, color_scheme=scheme)
        said: list[str] = []
        asked: list[str] = []
        page.on("console", lambda message: said.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(page_file)
        page.wait_for_function("document.querySelectorAll('.uplot canvas').length === 6")
        page.wait_for_timeout(100)
        drawn = {each: page.locator(f"#{each} canvas").evaluate(DRAWN) for each in ("replay", "rate", "wanted")}
        drawn |= {each: page.locator(f"#{each} canvas").evaluate(DRAWN) for each in ("padding", "seconds", "capture")}
        ladder, rows = page.inner_text("#ladder"), page.locator("#buckets tbody tr").count()
        names = page.inner_text("#ladders")
        page.set_viewport_size({"width": 420, "height": 800})
        page.wait_for_timeout(100)
        sideways = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        browser.close()
    assert said == []
    assert asked == [page_file]
    assert min(drawn.values()) > 100, drawn
    assert ladder.split() == [str(size) for size in result_of(profiled)["ladder"]]
    assert rows == 3
    assert "SGLang" in names
    assert sideways <= 0
