"""What is packaged is what is in the tree, and an installed wheel works by itself."""

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
ROOMS = ("buckets", "capture", "model", "scheduler")


def sources() -> dict[str, Path]:
    """Every file that the package should hold, by its name inside the wheel."""
    found = {}
    for room in ("wavegraph", *ROOMS):
        for path in (ROOT / room).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                name = path.relative_to(ROOT).as_posix()
                found[name if room == "wavegraph" else f"wavegraph/{name}"] = path
    return found


def test_every_package_is_listed_in_its_place() -> None:
    packages = {}
    for name, path in sources().items():
        if path.suffix == ".py":
            packages[Path(name).parent.as_posix().replace("/", ".")] = path.parent.relative_to(ROOT).as_posix()
    assert set(SETUPTOOLS["packages"]) == set(packages)
    folders = SETUPTOOLS["package-dir"]
    inside = {name: place for name, place in packages.items() if name != place.replace("/", ".")}
    assert folders == inside | {"wavegraph": "wavegraph"}


def test_every_package_has_an_init_file() -> None:
    names = {path.parent for path in sources().values() if path.suffix == ".py"}
    assert [folder for folder in names if not (folder / "__init__.py").is_file()] == []


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of the tree, so that nothing is left in it."""
    copy = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for room in ("wavegraph", *ROOMS):
        shutil.copytree(ROOT / room, copy / room, ignore=shutil.ignore_patterns("__pycache__"))
    target = tmp_path_factory.mktemp("wheel")
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(target)]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, str(copy)], check=True, timeout=120)
    (built,) = target.glob("*.whl")
    return built


@pytest.mark.slow
def test_wheel_holds_every_source_file(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        packaged = {name for name in archive.namelist() if ".dist-info/" not in name}
        licences = [name for name in archive.namelist() if name.endswith("LICENSE")]
    assert packaged == set(sources())
    assert licences


@pytest.mark.slow
def test_built_in_model_works_from_a_wheel(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    script = (
        "import wavegraph.builtin, wavegraph.scheduler\n"
        "files = wavegraph.builtin.builtin_path().iterdir()\n"
        "print(wavegraph.__file__, wavegraph.scheduler.__file__, *files, sep='\\n')"
    )
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "site")}
    run = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    first, second, *files = map(Path, run.stdout.split("\n")[:-1])
    assert first == tmp_path / "site/wavegraph/__init__.py"
    assert second == tmp_path / "site/wavegraph/scheduler/__init__.py"
    assert {file.name for file in files} == {"MODEL_CARD.md", "config.json", "model.safetensors", "tokenizer.json"}
