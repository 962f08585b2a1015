"""Checkpoints that load: every tensor in its place, in any dtype, within the memory promised."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.model.checkpoints import GATE, SINGLE, Checkpoint, assert_same, flat
from wavegraph.errors import CheckpointError, ConfigError
from wavegraph.model import loading
from wavegraph.model.config import OuroConfig
from wavegraph.model.loading import load_model
from wavegraph.model.ops.aten import AtenOps
from wavegraph.model.weights import model_from_tensors, random_weights, tensor_shapes

Raw = Callable[..., dict[str, Any]]

ALL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def test_tensors_arrive_fused_and_in_place(checkpoint: Checkpoint) -> None:
    model, stored = checkpoint.load(), checkpoint.tensors
    layer, prefix = model.weights.layers[1], "model.layers.1."
    parts = [stored[f"{prefix}self_attn.{name}_proj.weight"] for name in ("q", "k", "v")]
    assert torch.equal(layer.qkv, torch.cat(parts))
    parts = [stored[f"{prefix}mlp.{name}_proj.weight"] for name in ("gate", "up")]
    assert torch.equal(layer.gate_up, torch.cat(parts))
    for field, name in (
        ("attn_norm", "input_layernorm"),
        ("attn_out_norm", "input_layernorm_2"),
        ("mlp_norm", "post_attention_layernorm"),
        ("mlp_out_norm", "post_attention_layernorm_2"),
        ("o", "self_attn.o_proj"),
        ("down", "mlp.down_proj"),
    ):
        assert torch.equal(getattr(layer, field), stored[f"{prefix}{name}.weight"]), field
    assert torch.equal(model.weights.embedding, stored["model.embed_tokens.weight"])
    assert torch.equal(model.weights.lm_head, stored["lm_head.weight"])
    assert torch.equal(model.weights.norm, stored["model.norm.weight"])
    assert torch.equal(model.weights.gate_weight, stored[GATE][0])
    assert model.weights.gate_bias.shape == (1,)


def test_shards_equal_one_file(checkpoint: Checkpoint, goldens: Path) -> None:
    single = checkpoint.load()
    checkpoint.shard()
    assert_same(single, checkpoint.load())
    ops = AtenOps()
    assert_same(
        load_model(goldens / "tiny", ops=ops, max_model_len=8),
        load_model(str(goldens / "tiny_sharded"), ops=ops, max_model_len=8),
    )


@pytest.mark.parametrize("block", [1, 100, 4000])
def test_block_size_changes_nothing(block: int, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = checkpoint.load()
    monkeypatch.setattr(loading, "_BLOCK_BYTES", block)
    assert_same(whole, checkpoint.load())


@pytest.mark.parametrize("stored", ALL_DTYPES)
@pytest.mark.parametrize("wanted", ALL_DTYPES)
def test_dtypes_are_converted(stored: torch.dtype, wanted: torch.dtype, tmp_path: Path, raw_config: Raw) -> None:
    saved = Checkpoint(tmp_path, raw_config(), dtype=stored)
    model = saved.load(dtype=str(wanted).removeprefix("torch."))
    assert {tensor.dtype for tensor in flat(model).values()} == {wanted} == {model.dtype}
    assert_same(model, model_from_tensors(saved.config, saved.tensors, ops=AtenOps(), dtype=wanted))


def test_auto_dtype_is_the_config_s_else_the_file_s(tmp_path: Path, raw_config: Raw) -> None:
    named = Checkpoint(tmp_path / "named", raw_config(torch_dtype="float32"), dtype=torch.bfloat16)
    assert named.load().dtype == torch.float32
    unnamed = Checkpoint(tmp_path / "unnamed", raw_config(torch_dtype=...), dtype=torch.bfloat16)
    assert unnamed.load().dtype == torch.bfloat16
    assert loading.checkpoint_dtype(named.folder, named.config) == torch.float32
    assert loading.checkpoint_dtype(unnamed.folder, unnamed.config) == torch.bfloat16
    assert loading.checkpoint_dtype(unnamed.folder, unnamed.config, "float16") == torch.float16


def test_overflow_in_float16_is_refused(checkpoint: Checkpoint) -> None:
    checkpoint.tensors["model.norm.weight"][3] = 70000.0
    checkpoint.save(SINGLE, checkpoint.tensors)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight has values beyond float16's 65504"):
        checkpoint.load(dtype="float16")
    assert checkpoint.load(dtype="bfloat16").dtype == torch.bfloat16


def test_tied_embeddings(tmp_path: Path, raw_config: Raw) -> None:
    tied = Checkpoint(tmp_path, raw_config(tie_word_embeddings=True))
    assert "lm_head.weight" not in tied.tensors
    model = tied.load()
    assert model.weights.lm_head is model.weights.embedding
    tied.save(SINGLE, tied.tensors | {"lm_head.weight": tied.tensors["model.embed_tokens.weight"].clone()})
    tied.refused(r"1 tensor\(s\) have no place in this model, first lm_head\.weight")


def test_progress_counts_all_bytes(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "_BLOCK_BYTES", 2000)
    total = sum(tensor.nbytes for tensor in checkpoint.tensors.values())
    calls: list[tuple[int, int]] = []
    checkpoint.load(dtype="bfloat16", progress=lambda done, of: calls.append((done, of)))
    assert {of for _, of in calls} == {total}
    assert [done for done, _ in calls] == sorted({done for done, _ in calls})
    assert calls[-1] == (total, total)


def test_max_model_len_bounds_the_rotary_tables(checkpoint: Checkpoint) -> None:
    assert checkpoint.load().rope.cos.shape == (128, 8)
    assert checkpoint.load(max_model_len=10).rope.sin.shape == (10, 8)
    for length in (0, -1, 129):
        with pytest.raises(ConfigError, match=rf"max_model_len: must be in 1\.\.128 .* got {length}"):
            checkpoint.load(max_model_len=length)


def test_unknown_dtype_is_refused(checkpoint: Checkpoint) -> None:
    with pytest.raises(ConfigError, match=r"dtype: must be auto or one of float32, bfloat16, float16, got 'int8'"):
        checkpoint.load(dtype="int8")


def test_links_inside_and_linked_folders_are_followed(checkpoint: Checkpoint) -> None:
    whole = checkpoint.load()
    checkpoint.shard()
    (checkpoint.folder / "data").mkdir()
    shutil.move(checkpoint.folder / "part-0.safetensors", checkpoint.folder / "data")
    (checkpoint.folder / "part-0.safetensors").symlink_to("data/part-0.safetensors")
    link = checkpoint.folder.parent / "link"
    link.symlink_to(checkpoint.folder)
    assert_same(whole, load_model(link, ops=AtenOps()))


class CopyingOps(AtenOps):
    """Packs into a copy, as operator sets with a layout of their own do."""

    def pack_linear(self, weight: Tensor) -> Tensor:
        return weight.clone()

    def pack_gate_up(self, weight: Tensor) -> Tensor:
        return weight.clone()


def test_packing_into_a_copy_changes_nothing(checkpoint: Checkpoint) -> None:
    assert_same(checkpoint.load(), load_model(checkpoint.folder, ops=CopyingOps()))


def test_random_weights_have_the_public_layout(checkpoint: Checkpoint, goldens: Path) -> None:
    config = OuroConfig.from_file(goldens / "tiny_gqa")
    public = load_file(goldens / "tiny_gqa" / SINGLE)
    assert {name: tuple(tensor.shape) for name, tensor in public.items()} == tensor_shapes(config)
    again = dict(random_weights(checkpoint.config, seed=7))
    other = dict(random_weights(checkpoint.config, seed=8))
    name = "model.layers.1.mlp.down_proj.weight"
    assert again.keys() == tensor_shapes(checkpoint.config).keys()
    assert torch.equal(again[name], checkpoint.tensors[name])
    assert not torch.equal(again[name], other[name])
    assert abs(float(again["model.embed_tokens.weight"].std()) - 1) < 0.05


def test_random_weights_are_these_bits(checkpoint: Checkpoint) -> None:
    values = checkpoint.tensors["model.embed_tokens.weight"].flatten()[:3]
    assert values.numpy().view("<u4").tolist() == [3214272160, 1049141869, 3213765564]


# VmHWM and not ru_maxrss, which a process inherits from the one that started it.
MEASURE = """
import sys, torch
from wavegraph.model.loading import load_model
from wavegraph.model.ops.aten import AtenOps
class CopyingOps(AtenOps):
    def pack_linear(self, weight): return weight.clone()
    def pack_gate_up(self, weight): return weight.clone()
torch.ones(64, 64, dtype=torch.bfloat16).float() @ torch.ones(64, 64)
def kilobytes(field):
    with open("/proc/self/status") as status:
        return int(next(line for line in status if line.startswith(field)).split()[1])
before = kilobytes("VmRSS")
model = load_model(sys.argv[1], ops=CopyingOps(), dtype=sys.argv[2])
print(kilobytes("VmHWM") - before)
"""


@pytest.mark.slow
def test_peak_memory_is_the_checkpoint_and_a_tenth(tmp_path: Path, raw_config: Raw) -> None:
    raw = raw_config(
        vocab_size=8192,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=128,
        torch_dtype="bfloat16",
    )
    Checkpoint(tmp_path, raw, dtype=torch.bfloat16)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    size = (tmp_path / SINGLE).stat().st_size
    for dtype in ("bfloat16", "float16"):
        command = [sys.executable, "-c", MEASURE, str(tmp_path), dtype]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        ratio = int(done.stdout) * 1024 / size
        assert 0.9 <= ratio <= 1.1, f"{dtype}: {ratio:.3f} of the checkpoint's size"
