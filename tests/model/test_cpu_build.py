"""Building, keeping and loading the C++ operators. Most tests use a compiler that only pretends."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.model.cpu_step import ISAS
from wavegraph.errors import ConfigError
from wavegraph.model.ops import build
from wavegraph.model.ops.cpu import CpuOps, usable_isas

BUILD_AND_PRINT = "from wavegraph.model.ops import build; print(build.cached_library())"

# Notes each call; writes the output file in two parts, with a pause between them.
FAKE_COMPILER = """#!/bin/sh
echo "$@" >> {log}
case "$1" in --version) echo fake 1.0; exit 0;; esac
while [ $# -gt 0 ]; do case "$1" in -o) out=$2;; esac; shift; done
[ -z "$out" ] && exit 0
printf first > "$out"; sleep {seconds}; printf second >> "$out"
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WAVEGRAPH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "ops"


def fake_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float = 0) -> Path:
    log = tmp_path / "log"
    script = tmp_path / "fake-cxx"
    script.write_text(FAKE_COMPILER.format(log=log, seconds=seconds))
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    return log


def links(log: Path) -> int:
    return sum("-shared" in line for line in log.read_text().splitlines())


def test_a_build_is_kept(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = fake_compiler(tmp_path, monkeypatch)
    first = build.cached_library()
    assert first.read_text() == "firstsecond"
    assert first.parent == cache
    before = len(build.compiler_runs())
    assert build.cached_library() == first
    assert [run.split()[-1] for run in build.compiler_runs()[before:]] == ["--version"]
    assert links(log) == 1
    assert {path.name for path in cache.iterdir()} == {"lock", first.name}


def test_another_source_is_another_build(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_compiler(tmp_path, monkeypatch)
    first = build.cached_library()
    sources = tmp_path / "sources"
    sources.mkdir()
    for path in build.SOURCES.iterdir():
        (sources / path.name).write_text(path.read_text())
    monkeypatch.setattr(build, "SOURCES", sources)
    assert build.cached_library() == first
    (sources / "simd.h").write_text("// changed")
    assert build.cached_library() != first


def test_two_processes_build_once(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = fake_compiler(tmp_path, monkeypatch, seconds=0.3)
    command = [sys.executable, "-P", "-c", BUILD_AND_PRINT]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    paths = {Path(process.communicate(timeout=60)[0].strip()) for process in both}
    assert [process.returncode for process in both] == [0, 0]
    assert len(paths) == 1
    assert paths.pop().read_text() == "firstsecond"
    assert links(log) == 1


def test_a_killed_build_leaves_nothing_to_load(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_compiler(tmp_path, monkeypatch, seconds=30)
    process = subprocess.Popen([sys.executable, "-P", "-c", BUILD_AND_PRINT], start_new_session=True)
    while not list(cache.glob("build-*/*.o")):
        assert process.poll() is None
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert not list(cache.glob("*.so"))
    fake_compiler(tmp_path, monkeypatch)
    assert build.cached_library().read_text() == "firstsecond"
    assert not list(cache.glob("build-*"))


def test_without_a_compiler(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(build.BuildError, match=r"no C\+\+ compiler: .* 'g\+\+'; install g\+\+"):
        build.cached_library()
    monkeypatch.setenv("CXX", "no-such-compiler -x")
    with pytest.raises(build.BuildError, match="no program 'no-such-compiler'"):
        build.cached_library()


def test_a_compiler_that_fails_is_quoted(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_compiler(tmp_path, monkeypatch)
    script = tmp_path / "fake-cxx"
    script.write_text(script.read_text().replace("printf first", "echo bad day >&2; exit 3; printf first"))
    with pytest.raises(build.BuildError, match="the compiler said: bad day"):
        build.cached_library()
    assert {path.name for path in cache.iterdir()} == {"lock"}


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("WAVEGRAPH_CACHE", str(tmp_path / "file"))
    with pytest.raises(build.BuildError, match=r"WAVEGRAPH_CACHE: .* cannot be written"):
        build.cached_library()


def test_one_whole_build_a_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = build.ensure_loaded()
    assert build.loaded_library() == loaded
    assert build.load_library(tmp_path / loaded.name) == loaded
    with pytest.raises(build.BuildError, match="loaded already"):
        build.load_library(tmp_path / "wavegraph_ops-0.so")
    monkeypatch.setattr(build, "_loaded", None)
    damaged = tmp_path / loaded.name
    for content in (b"", loaded.read_bytes()[:5000], b"x" + loaded.read_bytes()[1:]):
        damaged.write_bytes(content)
        with pytest.raises(build.BuildError, match="is not the file that was built; delete it"):
            build.load_library(damaged)
    with pytest.raises(build.BuildError, match="cannot be loaded"):
        build.load_library(tmp_path / "missing.so")


def test_a_damaged_build_is_built_again(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = fake_compiler(tmp_path, monkeypatch)
    build.cached_library().write_text("firstsec")
    assert build.cached_library().read_text() == "firstsecond"
    assert links(log) == 2


def test_a_library_loads_without_a_compiler() -> None:
    script = (
        "from pathlib import Path; from wavegraph.model.ops import build, cpu; "
        f"ops = cpu.CpuOps(library=Path({str(build.ensure_loaded())!r})); "
        "assert build.compiler_runs() == (); print(ops.isa)"
    )
    environment = {key: value for key, value in os.environ.items() if key != "CXX"} | {"PATH": ""}
    done = subprocess.run(
        [sys.executable, "-P", "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == CpuOps().isa


def test_the_instruction_set_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WAVEGRAPH_CPU_ISA", raising=False)
    assert set(usable_isas()) <= set(ISAS)
    assert set(ISAS) - {"amx"} <= set(usable_isas())  # AMX must also pass its own comparison
    assert CpuOps().isa == usable_isas()[-1]
    monkeypatch.setenv("WAVEGRAPH_CPU_ISA", "portable")
    assert CpuOps().isa == "portable"
    assert CpuOps("avx2" if "avx2" in ISAS else None).isa in ("avx2", "portable")
    monkeypatch.setenv("WAVEGRAPH_CPU_ISA", "sse9")
    with pytest.raises(ConfigError, match="WAVEGRAPH_CPU_ISA: 'sse9' cannot run here; choose one of portable"):
        CpuOps()
