"""One clear error for each way a checkpoint can be broken."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.model.checkpoints import GATE, INDEX, SINGLE, Checkpoint
from wavegraph.errors import CheckpointError
from wavegraph.model import loading
from wavegraph.model.loading import load_model
from wavegraph.model.ops.aten import AtenOps


def test_missing_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_lookup(*_: object, **__: object) -> str:
        raise AssertionError("a path was looked up on the Hub")

    monkeypatch.setattr(loading, "snapshot_download", no_lookup)
    for path in (
        str(tmp_path / "no"),
        "./owner/name",
        "../name",
        "~/no-such-folder",
        "name",
        "a/b/c",
        "owner/",
        "nul\0",
    ):
        with pytest.raises(CheckpointError, match="no such folder"):
            load_model(path, ops=AtenOps())


@pytest.mark.parametrize("path", ["~no-such-user-here/x", "x" * 5000])
def test_what_can_be_no_path(path: str) -> None:
    with pytest.raises(CheckpointError, match="is no usable path") as caught:
        load_model(path, ops=AtenOps())
    assert len(str(caught.value)) < 250


def test_the_empty_name_is_not_the_current_folder(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(checkpoint.folder)
    with pytest.raises(CheckpointError, match="name is empty"):
        load_model("", ops=AtenOps())
    load_model(".", ops=AtenOps())


def test_file_instead_of_folder(checkpoint: Checkpoint) -> None:
    with pytest.raises(CheckpointError, match=r"model\.safetensors: is a file; give the folder"):
        load_model(checkpoint.folder / SINGLE, ops=AtenOps())


def test_missing_or_broken_config(checkpoint: Checkpoint) -> None:
    (checkpoint.folder / "config.json").write_text("{'a': 1}")
    checkpoint.refused(r"config\.json: is not JSON")
    (checkpoint.folder / "config.json").unlink()
    checkpoint.refused(r"config\.json: no such file")


def test_no_weights(checkpoint: Checkpoint) -> None:
    (checkpoint.folder / SINGLE).unlink()
    checkpoint.refused(r"holds no weights; it must have model\.safetensors or model\.safetensors\.index\.json")


def test_pickled_weights_are_never_opened(checkpoint: Checkpoint) -> None:
    (checkpoint.folder / SINGLE).unlink()
    (checkpoint.folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    checkpoint.refused(r"holds only pickled weights \(pytorch_model\.bin\).*convert them to model\.safetensors")


def test_missing_tensor(checkpoint: Checkpoint) -> None:
    del checkpoint.tensors[GATE]
    checkpoint.save(SINGLE, checkpoint.tensors)
    checkpoint.refused(rf"1 tensor\(s\) that the config asks for are missing, first {GATE}")


def test_unexpected_tensor(checkpoint: Checkpoint) -> None:
    checkpoint.save(SINGLE, checkpoint.tensors | {"model.layers.0.self_attn.q_proj.bias": torch.zeros(32)})
    checkpoint.refused(r"have no place in this model, first model\.layers\.0\.self_attn\.q_proj\.bias")


@pytest.mark.parametrize("shape", [(24,), (24, 1), (2, 24), (1, 24, 1), ()])
def test_wrong_shape(shape: tuple[int, ...], checkpoint: Checkpoint) -> None:
    checkpoint.save(SINGLE, checkpoint.tensors | {GATE: torch.zeros(shape)})
    checkpoint.refused(rf"{GATE} has shape .*, but the config asks for \[1, 24\]")


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.int8, torch.float8_e4m3fn, torch.bool])
def test_unsupported_stored_dtype(dtype: torch.dtype, checkpoint: Checkpoint) -> None:
    checkpoint.save(SINGLE, checkpoint.tensors | {GATE: torch.zeros((1, 24)).to(dtype)})
    checkpoint.refused(rf"{GATE} is stored as .*; only F32, BF16, F16 can be loaded")


def test_tensor_in_two_shards(checkpoint: Checkpoint) -> None:
    weight_map = checkpoint.shard()
    other = next(file for file in weight_map.values() if file != weight_map[GATE])
    names = [name for name, file in weight_map.items() if file == other]
    checkpoint.save(other, {name: checkpoint.tensors[name] for name in [*names, GATE]})
    checkpoint.refused(rf"{GATE}: is in two shards, {weight_map[GATE]} and {other}")


def test_shard_with_a_tensor_the_index_does_not_name(checkpoint: Checkpoint) -> None:
    weight_map = checkpoint.shard()
    file = weight_map.pop(GATE)
    checkpoint.write_index(weight_map)
    checkpoint.refused(rf"{file}: holds {GATE}, which model\.safetensors\.index\.json does not name")


def test_shard_without_a_tensor_of_the_index(checkpoint: Checkpoint) -> None:
    weight_map = checkpoint.shard()
    names = [name for name, file in weight_map.items() if file == weight_map[GATE] and name != GATE]
    checkpoint.save(weight_map[GATE], {name: checkpoint.tensors[name] for name in names})
    checkpoint.refused(rf"{weight_map[GATE]}: lacks {GATE}, which model\.safetensors\.index\.json says it holds")


def test_missing_shard(checkpoint: Checkpoint) -> None:
    checkpoint.shard()
    (checkpoint.folder / "part-1.safetensors").unlink()
    checkpoint.refused(r"part-1\.safetensors: no such file, but model\.safetensors\.index\.json names it")


def test_missing_tensor_in_the_index(checkpoint: Checkpoint) -> None:
    del checkpoint.tensors[GATE]
    checkpoint.shard()
    checkpoint.refused(rf"missing, first {GATE}")


@pytest.mark.parametrize(
    "form", ["../{name}", "{folder}/{name}", "sub/../../{name}", "link.safetensors", "../checkpoint/part-1.safetensors"]
)
def test_index_that_points_outside(form: str, checkpoint: Checkpoint) -> None:
    weight_map = checkpoint.shard()
    outside = checkpoint.folder.parent / "outside.safetensors"
    shutil.move(checkpoint.folder / "part-0.safetensors", outside)
    (checkpoint.folder / "link.safetensors").symlink_to(outside)
    name = form.format(name=outside.name, folder=outside.parent)
    checkpoint.write_index({key: name if file.startswith("part-0") else file for key, file in weight_map.items()})
    checkpoint.refused("points outside the checkpoint's folder")


@pytest.mark.parametrize("name", ["nul\0", "x" * 5000, "loop.safetensors"])
def test_index_with_names_that_can_be_no_file(name: str, checkpoint: Checkpoint) -> None:
    weight_map = checkpoint.shard()
    (checkpoint.folder / "loop.safetensors").symlink_to("loop.safetensors")
    checkpoint.write_index(dict.fromkeys(weight_map, name))
    checkpoint.refused("holds no file|no such file")


def test_a_tensor_twice_in_one_header(checkpoint: Checkpoint) -> None:
    file = checkpoint.folder / SINGLE
    content = file.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = content[8 : 8 + size].rstrip()
    entry = json.dumps({GATE: json.loads(header)[GATE]}).encode()
    header = header[:-1] + b"," + entry[1:]
    file.write_bytes(len(header).to_bytes(8, "little") + header + content[8 + size :])
    checkpoint.refused(rf"model\.safetensors: the key '{GATE}' is given twice")


@pytest.mark.parametrize("weight_map", [None, [], {}, {GATE: 1}, {GATE: ""}, {GATE: None}])
def test_index_that_is_no_map(weight_map: object, checkpoint: Checkpoint) -> None:
    checkpoint.shard()
    checkpoint.write_index(weight_map)
    checkpoint.refused("must (name a file for each tensor|be mapped to a file name)")


@pytest.mark.parametrize("content", [b"", b"{", b"[]"])
def test_broken_index(content: bytes, checkpoint: Checkpoint) -> None:
    checkpoint.shard()
    (checkpoint.folder / INDEX).write_bytes(content)
    checkpoint.refused(r"index\.json: (is not JSON|must hold a JSON object)")


@pytest.mark.parametrize("keep", [0, 4, 8, 100, -1])
def test_truncated_file(keep: int, checkpoint: Checkpoint) -> None:
    content = (checkpoint.folder / SINGLE).read_bytes()
    (checkpoint.folder / SINGLE).write_bytes(content[:keep])
    checkpoint.refused(r"model\.safetensors: cannot be read as safetensors .*; copy the checkpoint again")


@pytest.mark.parametrize(
    "change",
    [
        lambda content: b"\xff" * 8 + content[8:],
        lambda content: content[:8] + b"!" + content[9:],
        lambda content: content.replace(b"data_offsets", b"data_offsett", 1),
        lambda content: content + b"\0",
        lambda _: b"not safetensors at all",
    ],
)
def test_corrupt_header(change: Callable[[bytes], bytes], checkpoint: Checkpoint) -> None:
    file = checkpoint.folder / SINGLE
    file.write_bytes(change(file.read_bytes()))
    checkpoint.refused(r"model\.safetensors: cannot be read as safetensors")


def test_weights_that_are_a_folder(checkpoint: Checkpoint) -> None:
    (checkpoint.folder / SINGLE).unlink()
    (checkpoint.folder / SINGLE).mkdir()
    checkpoint.refused("holds no weights")
