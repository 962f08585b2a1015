"""The float64 reference against what the public model computed (goldens)."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from wavegraph.model.reference import ReferenceModel, exit_steps

Golden = Callable[[str], dict[str, np.ndarray[Any, Any]]]

TOLERANCE = 1e-4
NAMES = ("tiny", "tiny_gqa", "tiny_hd32")


@pytest.mark.parametrize("name", NAMES)
def test_forward_equals_the_public_model(name: str, goldens: Path, golden: Golden) -> None:
    want = golden(name)
    got = ReferenceModel.from_folder(goldens / name).forward(want["token_ids"].tolist())
    for field, value in (
        ("hidden", got.hidden),
        ("step_logits", got.logits),
        ("logits", got.logits[-1]),
        ("gate_logit", got.gate_logits),
        ("lam", got.lam),
        ("pdf", got.pdf),
        ("cdf", got.cdf),
        ("kv8_k", got.k[:, :, :8]),
        ("kv8_v", got.v[:, :, :8]),
    ):
        assert value.shape == want[field].shape
        np.testing.assert_allclose(value, want[field], rtol=0, atol=TOLERANCE, err_msg=field)


@pytest.mark.parametrize("name", NAMES)
def test_exit_steps_equal_the_public_model(name: str, goldens: Path, golden: Golden) -> None:
    want = golden(name)
    cdf = ReferenceModel.from_folder(goldens / name).forward(want["token_ids"].tolist()).cdf
    for threshold, steps in zip(want["thresholds"], want["exit_steps"], strict=True):
        np.testing.assert_array_equal(exit_steps(cdf, threshold), steps, err_msg=f"threshold {threshold}")


def test_exit_needs_the_threshold_reached_not_passed() -> None:
    cdf = np.array([[0.5, 0.2], [0.75, 0.6], [1.0, 0.999]])
    for threshold, steps in ((0.0, [0, 0]), (0.5, [0, 1]), (0.6, [1, 1]), (1.0, [2, 2]), (1.1, [2, 2])):
        assert exit_steps(cdf, threshold).tolist() == steps


@pytest.mark.parametrize("name", NAMES)
def test_generation_equals_the_public_model(name: str, goldens: Path, golden: Golden) -> None:
    want = golden(name)
    model = ReferenceModel.from_folder(goldens / name)
    prompt = want["gen_prompt"].tolist()
    full = model.generate(prompt, len(want["gen_tokens"]))
    assert full.tokens == want["gen_tokens"].tolist()
    np.testing.assert_allclose(full.margins, want["gen_margins"], rtol=0, atol=2 * TOLERANCE)
    for key in want:
        if key.startswith("gen_tokens_thr_"):
            got = model.generate(prompt, 24, threshold=float(key.removeprefix("gen_tokens_thr_")))
        elif key.startswith("gen_tokens_step_"):
            got = model.generate(prompt, 24, exit_at_step=int(key.removeprefix("gen_tokens_step_")))
        else:
            continue
        assert got.tokens == want[key].tolist(), key


def test_shards_are_read_like_one_file(goldens: Path) -> None:
    tokens = [3, 1, 4, 1, 5]
    single = ReferenceModel.from_folder(goldens / "tiny").forward(tokens)
    sharded = ReferenceModel.from_folder(goldens / "tiny_sharded").forward(tokens)
    np.testing.assert_array_equal(single.logits, sharded.logits)


def test_cached_pass_equals_whole_pass(goldens: Path) -> None:
    model = ReferenceModel.from_folder(goldens / "tiny_gqa")
    tokens = [9, 8, 7, 6, 5, 4, 3]
    whole = model.forward(tokens)
    state = model.forward(tokens[:3])
    state = model.forward(tokens[3:5], past=state)
    state = model.forward(tokens[5:], past=state)
    np.testing.assert_allclose(state.logits, whole.logits[:, 5:], rtol=0, atol=1e-11)
    np.testing.assert_allclose(state.k, whole.k, rtol=0, atol=1e-11)


def test_stop_token_ends_generation(goldens: Path, golden: Golden) -> None:
    want = golden("tiny")["gen_tokens"].tolist()
    model = ReferenceModel.from_folder(goldens / "tiny")
    got = model.generate(golden("tiny")["gen_prompt"].tolist(), 24, stop_token_ids=[want[5]])
    assert got.tokens == want[: want.index(want[5]) + 1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_checkpoints_are_read(dtype: torch.dtype, goldens: Path, tmp_path: Path) -> None:
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(goldens / "tiny" / "model.safetensors").items()}
    save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads((goldens / "tiny" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    exact = ReferenceModel(config, {name: tensor.double().numpy() for name, tensor in tensors.items()})
    read = ReferenceModel.from_folder(tmp_path)
    np.testing.assert_array_equal(read.forward([1, 2, 3]).logits, exact.forward([1, 2, 3]).logits)
