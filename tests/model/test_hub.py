"""Checkpoints by Hub id, from a local cache with the network off."""

import shutil
from pathlib import Path

import huggingface_hub.constants
import pytest

from tests.model.checkpoints import SINGLE, Checkpoint, assert_same
from wavegraph.errors import CheckpointError
from wavegraph.model.loading import load_model, resolve_checkpoint
from wavegraph.model.ops.aten import AtenOps


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty Hub cache, with the network switched off."""
    cache = tmp_path / "hub"
    cache.mkdir()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    return cache


def put_in_cache(cache: Path, source: Path, hub_id: str) -> Path:
    """Store a folder's files as the Hub's client does: blobs, and a snapshot of links to them."""
    repository = cache / f"models--{hub_id.replace('/', '--')}"
    snapshot = repository / "snapshots" / ("0" * 40)
    for folder in (repository / "blobs", repository / "refs", snapshot):
        folder.mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    for file in source.iterdir():
        shutil.copy(file, repository / "blobs" / f"blob-{file.name}")
        (snapshot / file.name).symlink_to(f"../../blobs/blob-{file.name}")
    return snapshot


@pytest.mark.parametrize("name", ["tiny", "tiny_sharded"])
def test_hub_id_is_served_from_the_cache(name: str, hub_cache: Path, goldens: Path) -> None:
    snapshot = put_in_cache(hub_cache, goldens / name, "owner/tiny-model")
    assert resolve_checkpoint("owner/tiny-model") == snapshot
    assert resolve_checkpoint("owner/tiny-model", cache_dir=hub_cache) == snapshot
    loaded = load_model("owner/tiny-model", ops=AtenOps(), max_model_len=8)
    assert_same(loaded, load_model(goldens / name, ops=AtenOps(), max_model_len=8))


def test_cache_links_must_end_in_its_blobs(hub_cache: Path, goldens: Path, tmp_path: Path) -> None:
    snapshot = put_in_cache(hub_cache, goldens / "tiny", "owner/tiny-model")
    (snapshot / SINGLE).unlink()
    (snapshot / SINGLE).symlink_to(shutil.copy(goldens / "tiny" / SINGLE, tmp_path / "elsewhere"))
    with pytest.raises(CheckpointError, match="points outside the checkpoint's folder"):
        load_model("owner/tiny-model", ops=AtenOps())


@pytest.mark.parametrize("hub_id", ["owner/absent", "owner/two..dots", "owner/two--dashes"])
def test_hub_id_that_cannot_be_had(hub_id: str, hub_cache: Path) -> None:
    with pytest.raises(CheckpointError, match="the Hub gives no such checkpoint") as caught:
        load_model(hub_id, ops=AtenOps())
    assert "\n" not in str(caught.value)


def test_existing_path_wins_over_a_hub_id(
    checkpoint: Checkpoint, hub_cache: Path, goldens: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_in_cache(hub_cache, goldens / "tiny", "owner/name")
    monkeypatch.chdir(checkpoint.folder.parent)
    Path("owner").mkdir()
    checkpoint.folder.rename("owner/name")
    assert load_model("owner/name", ops=AtenOps()).config == checkpoint.config
