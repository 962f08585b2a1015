"""``precompile``, ``bundle inspect`` and ``--bundle``: nothing is compiled, and what does not fit is refused."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from wavegraph.capture.bundle import read_bundle
from wavegraph.cli import main
from wavegraph.config import EngineConfig
from wavegraph.errors import BundleError, ConfigError
from wavegraph.llm import LLM
from wavegraph.model.ops import build
from wavegraph.sampling import SamplingParams
from wavegraph.startup.precompile import precompile

GOLDENS = Path(__file__).parents[1] / "goldens"
TINY = str(GOLDENS / "tiny")
IDS = "1,2,3,4,5"
SMALL = ["--max-num-seqs", "2", "--max-model-len", "64"]
CONFIG = EngineConfig(max_num_seqs=2, max_model_len=64)

# Notes that it was called, and fails.
FAKE_COMPILER = '#!/bin/sh\necho "$0 $@" >> {log}\nexit 1\n'


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bundles") / "tiny"
    result = run("precompile", TINY, "--out", str(folder), "--ladder", "8,1,3")
    assert result.exit_code == 0, result.output
    return folder


def tokens_of(bundle: Path | None, **options: Any) -> tuple[int, ...]:
    with LLM(TINY, CONFIG, bundle=bundle, **options) as llm:
        return llm.generate([1, 2, 3, 4, 5], SamplingParams(max_tokens=6, ignore_eos=True))[0].token_ids


def fresh(tmp_path: Path, *arguments: str) -> tuple[list[int], list[str]]:
    """Generate in a process of its own, whose only compiler notes its calls. Returns the tokens, and those calls."""
    log, cache = tmp_path / "calls", tmp_path / "cache"
    for name in ("g++", "c++", "gcc", "cc", "clang++", "ninja"):
        (tmp_path / name).write_text(FAKE_COMPILER.format(log=log))
        (tmp_path / name).chmod(0o755)
    environment = {key: value for key, value in os.environ.items() if key != "CXX"}
    environment |= {"PATH": str(tmp_path), "WAVEGRAPH_CACHE": str(cache)}
    command = [sys.executable, "-P", "-m", "wavegraph", "generate", TINY, "--prompt-ids", IDS, "--max-tokens", "6"]
    done = subprocess.run(
        [*command, "--ignore-eos", "--json", "-", *SMALL, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    outputs = json.loads(done.stdout)["outputs"]
    assert not cache.exists() or not list(cache.rglob("*.so"))
    return outputs[0]["token_ids"], log.read_text().splitlines() if log.exists() else []


def test_a_fresh_process_compiles_nothing_and_gives_the_same_tokens(bundle: Path, tmp_path: Path) -> None:
    tokens, calls = fresh(tmp_path, "--bundle", str(bundle))
    assert calls == []
    assert tuple(tokens) == tokens_of(None)
    # And the counting counts: without the bundle the compiler is asked.
    assert fresh(tmp_path)[1] != []


def test_the_bundle_runs_with_its_ladder(bundle: Path) -> None:
    before = build.compiler_runs()
    with LLM(TINY, CONFIG, bundle=bundle) as llm:
        assert llm.engine.sizes.ladder.sizes == (1, 3, 8)
        assert set(llm.engine.executor.core.facts) == {1, 3, 8}
        assert llm.engine.model.ops.name == "cpu"
    assert tokens_of(bundle) == tokens_of(bundle, backend="compiled") == tokens_of(None)
    assert len(build.compiler_runs()) == len(before) + (0 if build.loaded_library() else 1)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--dtype", "bfloat16"], "dtype: float32 in the bundle, bfloat16 here"),
        (["--dtype", "float16"], "dtype: float32 in the bundle, float16 here"),
        (["--buckets", "1,4"], "ladder: [1, 3, 8] in the bundle, [1, 4] here"),
        (["--page-size", "8"], "page_size: 16 in the bundle, 8 here"),
        (["--backend", "recorded"], "backend: 'recorded' runs no bundle"),
        (["--max-batched-tokens", "64"], "buckets=(1, 3, 8) do not reach max_num_batched_tokens=64"),
    ],
)
def test_options_that_do_not_fit_are_refused(bundle: Path, arguments: list[str], named: str) -> None:
    result = run("generate", TINY, "--prompt-ids", IDS, "--bundle", str(bundle), *arguments)
    assert result.exit_code == 2
    assert named in result.stderr
    assert result.stdout == ""


def test_another_model_is_refused(bundle: Path) -> None:
    with pytest.raises(BundleError, match=r"model\.\w+: \d+ in the bundle, \d+ here"):
        LLM(GOLDENS / "tiny_hd32", CONFIG, bundle=bundle)
    LLM(GOLDENS / "tiny_sharded", CONFIG, bundle=bundle).close()  # the same shape


def test_a_cpu_that_lacks_a_feature_is_named(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs = read_bundle(bundle).fingerprint["cpu_features"]
    if not needs:
        pytest.skip("this CPU has no feature that the kernels could need")
    monkeypatch.setattr(build, "cpu_features", lambda: frozenset(needs[:-1]))
    with pytest.raises(BundleError, match=rf"cpu_features: .* this CPU lacks {needs[-1]}\)"):
        LLM(TINY, CONFIG, bundle=bundle)
    assert f"this CPU lacks {needs[-1]}" in run("bundle", "inspect", str(bundle)).stdout


def test_a_bundle_for_lesser_cpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WAVEGRAPH_CPU_ISA", "portable")
    made = precompile(TINY, tmp_path / "bundle", ladder=[8])
    monkeypatch.delenv("WAVEGRAPH_CPU_ISA")
    assert made.fingerprint["cpu_features"] == []
    monkeypatch.setattr(build, "cpu_features", frozenset)
    with LLM(TINY, CONFIG, bundle=tmp_path / "bundle") as llm:
        assert llm.engine.model.ops.isa == "portable"  # type: ignore[attr-defined]


def test_a_damaged_bundle_is_refused_and_made_anew(bundle: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "bundle"
    precompile(TINY, damaged, ladder=[8])
    library = read_bundle(damaged).library
    content = bytearray(library.read_bytes())
    content[1000] ^= 1
    library.write_bytes(content)
    for command in (
        ["generate", TINY, "--prompt-ids", IDS, "--bundle", str(damaged)],
        ["bundle", "inspect", str(damaged)],
    ):
        result = run(*command)
        assert result.exit_code == 2
        assert f"is no whole bundle, since files/{library.name} is not what was written" in result.stderr
    assert run("precompile", TINY, "--out", str(damaged)).exit_code == 0
    assert read_bundle(damaged).library.read_bytes() != content


def test_inspect_shows_what_it_was_made_for(bundle: Path) -> None:
    shown = run("bundle", "inspect", str(bundle))
    assert shown.exit_code == 0
    for words in ("ladder                       1, 3, 8", "dtype                        float32", "fits this machine"):
        assert words in shown.stdout
    facts = json.loads(run("bundle", "inspect", str(bundle), "--json", "-").stdout)
    assert facts["fingerprint"] == read_bundle(bundle).fingerprint
    assert facts["differences"] == []
    assert [size > 10_000 for size in facts["files"].values()] == [True]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--target", "sm_70"], "target: 'sm_70' is unknown; use cpu"),
        (["--dtype", "float16"], "backend: the C++ operators compute in float32 or bfloat16, not float16"),
        (["--dtype", "int8"], "dtype: must be auto or one of float32, bfloat16, float16, got 'int8'"),
        (["--ladder", "0,4"], "bucket sizes are row counts of at least 1, got 0"),
        (["--page-size", "0"], "page_size must be an integer of at least 1, got 0"),
    ],
)
def test_precompile_refuses(tmp_path: Path, arguments: list[str], named: str) -> None:
    result = run("precompile", TINY, "--out", str(tmp_path / "out"), *arguments)
    assert result.exit_code == 2
    assert named in result.stderr
    assert not (tmp_path / "out").exists()


def test_precompile_without_a_compiler_or_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("precompile", str(tmp_path / "none"), "--out", str(tmp_path / "out")).exit_code == 2
    monkeypatch.setenv("CXX", "no-such-compiler")
    result = run("precompile", TINY, "--out", str(tmp_path / "out"))
    assert result.exit_code == 1
    assert "no C++ compiler: there is no program 'no-such-compiler'" in result.stderr
    with pytest.raises(ConfigError, match="target"):
        precompile(TINY, tmp_path / "out", target="tpu")
