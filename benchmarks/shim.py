"""Makes `wavegraph` importable from a checkout where nothing may be installed: a tree of links, and a version."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("buckets", "capture", "model", "scheduler")


def build_tree(folder: Path) -> Path:
    """Make ``folder`` a directory for ``sys.path`` or ``PYTHONPATH``; returns it.

    It holds the package as an installed one would lie, the rooms under it, and the metadata that
    `importlib.metadata.version` reads.
    """
    package = folder / "wavegraph"
    package.mkdir(parents=True)
    for path in (ROOT / "wavegraph").iterdir():
        if path.name != "__pycache__":
            (package / path.name).symlink_to(path)
    for room in ROOMS:
        (package / room).symlink_to(ROOT / room)
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    info = folder / f"wavegraph-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: wavegraph\nVersion: {version}\n")
    return folder
