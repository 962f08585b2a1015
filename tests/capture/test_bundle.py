"""Bundles: written whole or not at all, believed in nothing, refused with every difference named."""

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.capture.driver import tiny_config
from wavegraph.capture import bundle as module
from wavegraph.capture.bundle import Bundle, read_bundle, write_bundle
from wavegraph.capture.fingerprint import check_target, cpu_fingerprint, fingerprint_here, machine_differences
from wavegraph.errors import BundleError, ConfigError
from wavegraph.model.ops import build

LADDER = [1, 4, 8]


def fingerprint(**changes: Any) -> dict[str, Any]:
    return cpu_fingerprint(tiny_config(), torch.float32, 16, LADDER, "portable") | changes


def here(bundle: Bundle, dtype: torch.dtype = torch.float32, page_size: int = 16, **changes: Any) -> dict[str, Any]:
    return fingerprint_here(bundle, tiny_config(**changes), dtype, page_size, None)


@pytest.fixture
def library(tmp_path: Path) -> Path:
    path = tmp_path / "operators.so"
    path.write_bytes(random.Random(1).randbytes(5000))
    return path


@pytest.fixture
def folder(tmp_path: Path, library: Path) -> Path:
    write_bundle(tmp_path / "out" / "bundle", fingerprint(), {library.name: library})
    return tmp_path / "out" / "bundle"


def rewrite(folder: Path, **changes: Any) -> None:
    """Change the fingerprint as if it had been written so."""
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["fingerprint"] |= changes
    text = json.dumps(manifest)
    (folder / "manifest.json").write_text(text)
    (folder / "complete").write_text(hashlib.sha256(text.encode()).hexdigest())


def test_what_is_written_is_read(folder: Path, library: Path) -> None:
    bundle = read_bundle(folder)
    assert bundle.fingerprint == fingerprint()
    assert bundle.ladder.sizes == (1, 4, 8)
    assert bundle.library.read_bytes() == library.read_bytes()
    bundle.check_fits(here(bundle))
    assert machine_differences(bundle) == []
    assert {path.name for path in folder.parent.iterdir()} == {"bundle"}


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [Path.unlink, truncate, flip])
@pytest.mark.parametrize("name", ["complete", "manifest.json", "files/operators.so"])
def test_damage_of_any_file_is_refused(folder: Path, name: str, damage: Callable[[Path], None]) -> None:
    damage(folder / name)
    with pytest.raises(BundleError, match=r"bundle: is no whole bundle, since [a-z/.]+ is (missing|not what was)"):
        read_bundle(folder)


def test_what_is_no_bundle_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="is no bundle, since there is no such folder"):
        read_bundle(tmp_path / "missing")
    with pytest.raises(BundleError, match="complete is missing"):
        read_bundle(tmp_path)


def test_another_format_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FORMAT", 3)
    with pytest.raises(BundleError, match="has format 2, but this version reads 3"):
        read_bundle(folder)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"torch": "2.0.0"}, f"torch: 2.0.0 in the bundle, {torch.__version__} here"),
        ({"wavegraph": "0.0.9"}, "wavegraph: 0.0.9 in the bundle"),
        ({"operators": "00"}, "operators: 00 in the bundle"),
        ({"cxx11_abi": False}, "cxx11_abi: False in the bundle, True here"),
        ({"machine": "aarch64"}, "machine: aarch64 in the bundle"),
        ({"isa": "avx1024"}, "isa: avx1024 in the bundle, portable here"),
        ({"cpu_features": ["avx2", "avx1024"]}, "cpu_features: the bundle needs avx2, avx1024, this CPU lacks avx1024"),
        ({"a_field_of_the_future": 1}, "a_field_of_the_future: 1 in the bundle, nothing here"),
    ],
)
def test_another_machine_or_version_is_refused(folder: Path, changes: dict[str, Any], words: str) -> None:
    rewrite(folder, **changes)
    bundle = read_bundle(folder)
    with pytest.raises(BundleError) as raised:
        bundle.check_fits(here(bundle))
    assert f"does not fit ({words}" in str(raised.value)
    if changes.keys() <= {"torch", "wavegraph", "operators", "cxx11_abi", "machine", "target", "cpu_features"}:
        assert machine_differences(bundle)


def test_every_difference_is_named(folder: Path) -> None:
    rewrite(folder, torch="2.0.0")
    bundle = read_bundle(folder)
    other = here(bundle, torch.bfloat16, 32, hidden_size=64, total_ut_steps=2)
    found = bundle.differences(other)
    assert found == [
        "dtype: float32 in the bundle, bfloat16 here",
        "model.hidden_size: 32 in the bundle, 64 here",
        "model.total_ut_steps: 3 in the bundle, 2 here",
        "page_size: 16 in the bundle, 32 here",
        f"torch: 2.0.0 in the bundle, {torch.__version__} here",
    ]
    with pytest.raises(BundleError) as raised:
        bundle.check_fits(other)
    assert f"does not fit ({'; '.join(found)})" in str(raised.value)
    assert not bundle.differences(here(bundle) | {"torch": "2.0.0"})


def test_what_changes_no_code_changes_no_fingerprint(folder: Path) -> None:
    """Too large a key would never be hit."""
    bundle = read_bundle(folder)
    bundle.check_fits(here(bundle, rope_theta=7.0, eos_token_id=3, max_position_embeddings=4096, rms_norm_eps=0.1))


def test_another_source_or_flag_is_another_fingerprint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = build.sources_digest()
    monkeypatch.setattr(build, "_FLAGS", (*build._FLAGS, "-funsafe"))
    assert build.sources_digest() != before
    monkeypatch.undo()
    (tmp_path / "kernels.cpp").write_text("// other")
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    assert build.sources_digest() != before


def test_targets_are_named() -> None:
    for target in ("cpu", "sm_80", "sm_90", "sm_100"):
        check_target(target)
    with pytest.raises(ConfigError, match="target: 'sm_70' is unknown; use cpu, sm_80, sm_90, sm_100"):
        check_target("sm_70")


# --- writing -----------------------------------------------------------------------------------------------


def test_a_bundle_takes_the_place_of_another_whole_or_not(folder: Path, library: Path) -> None:
    (folder / "complete").unlink()
    library.write_bytes(b"new")
    write_bundle(folder, fingerprint(torch="9"), {library.name: library})
    bundle = read_bundle(folder)
    assert (bundle.fingerprint["torch"], bundle.library.read_bytes()) == ("9", b"new")
    assert {path.name for path in folder.parent.iterdir()} == {"bundle"}


def test_the_old_bundle_is_there_until_the_new_one_is(
    folder: Path, library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rename(self: Path, target: Path) -> None:
        raise AssertionError(f"{self.name} went away for a while")

    monkeypatch.setattr(Path, "rename", rename)
    library.write_bytes(b"new")
    write_bundle(folder, fingerprint(torch="9"), {library.name: library})
    assert read_bundle(folder).library.read_bytes() == b"new"


def test_a_file_system_without_exchange(folder: Path, library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_exchange", lambda first, second: False)
    library.write_bytes(b"new")
    write_bundle(folder, fingerprint(torch="9"), {library.name: library})
    assert read_bundle(folder).library.read_bytes() == b"new"
    assert {path.name for path in folder.parent.iterdir()} == {"bundle"}


def test_what_is_no_bundle_is_not_replaced(folder: Path, library: Path) -> None:
    (folder / "thesis.txt").write_text("three years")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(BundleError, match="holds something that is no bundle; name another folder"):
        write_bundle(folder, fingerprint(), {library.name: library})
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    assert {path.name for path in folder.parent.iterdir()} == {"bundle"}


def test_a_place_that_cannot_be_written(tmp_path: Path, library: Path) -> None:
    with pytest.raises(BundleError, match="cannot be written"):
        write_bundle(library / "bundle", fingerprint(), {library.name: library})
    with pytest.raises(BundleError, match="cannot be written"):
        write_bundle(tmp_path / "bundle", fingerprint(), {"a.so": tmp_path / "missing.so"})
    assert {path.name for path in tmp_path.iterdir()} == {library.name}


# Writes bundles over and over; the library of each is all one byte, which the fingerprint names.
WRITER = """
import sys
from pathlib import Path
from wavegraph.capture.bundle import write_bundle
folder, library, first, step = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
print("ready", flush=True)
for number in range(first, 10**6, step):
    library.write_bytes(bytes([number % 256]) * 300_000)
    write_bundle(folder, {"number": number % 256, "ladder": [1]}, {"operators.so": library})
    if len(sys.argv) > 5 and number > first + step * int(sys.argv[5]):
        break
"""


def start_writer(folder: Path, library: Path, *numbers: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-P", "-c", WRITER, str(folder), str(library), *map(str, numbers)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def assert_whole(folder: Path) -> None:
    bundle = read_bundle(folder)
    assert set(bundle.library.read_bytes()) == {bundle.fingerprint["number"]}


@pytest.mark.slow
def test_writers_that_are_killed_leave_a_whole_bundle_or_none(tmp_path: Path) -> None:
    """Killed twenty times at random moments; what they left behind is removed by the next one."""
    folder, library = tmp_path / "out" / "bundle", tmp_path / "operators.so"
    draw = random.Random(0)
    whole = 0
    for number in range(20):
        process = start_writer(folder, library, number, 1)
        time.sleep(draw.uniform(0, 0.03))
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
        if folder.exists():
            assert_whole(folder)
            whole += 1
        else:
            assert whole == 0, "the old bundle is there until the new one is"
        assert sum(path.name.startswith(".bundle.partial-") for path in folder.parent.glob(".*")) <= 1
    assert whole > 5
    library.write_bytes(b"\x07" * 100)
    write_bundle(folder, {"number": 7, "ladder": [1]}, {"operators.so": library})
    assert_whole(folder)
    assert {path.name for path in folder.parent.iterdir()} == {"bundle"}


def test_two_writers_and_a_reader(tmp_path: Path) -> None:
    folder = tmp_path / "out" / "bundle"
    writers = [start_writer(folder, tmp_path / f"{index}.so", index, 2, 20) for index in range(2)]
    while any(process.poll() is None for process in writers):
        time.sleep(0.001)
    assert [process.wait() for process in writers] == [0, 0]
    for process in writers:
        process.communicate()
    assert_whole(folder)
    assert {path.name for path in folder.parent.iterdir()} == {"bundle"}
