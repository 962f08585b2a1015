"""Small random checkpoints on disk, to be loaded or damaged."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from wavegraph.errors import CheckpointError
from wavegraph.model.config import OuroConfig
from wavegraph.model.loading import load_model
from wavegraph.model.ops.aten import AtenOps
from wavegraph.model.weights import Model, random_weights

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
GATE = "model.early_exit_gate.weight"


class Checkpoint:
    """A small random checkpoint in a folder, to be damaged."""

    def __init__(self, folder: Path, raw: dict[str, Any], dtype: torch.dtype = torch.float32) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.config = OuroConfig.from_dict(raw)
        self.tensors = dict(random_weights(self.config, seed=7, dtype=dtype))
        (folder / "config.json").write_text(json.dumps(raw))
        save_file(self.tensors, folder / SINGLE)

    def shard(self) -> dict[str, str]:
        """Split into three files with an index. Returns its weight map."""
        (self.folder / SINGLE).unlink()
        weight_map = {}
        for part in range(3):
            names = list(self.tensors)[part::3]
            self.save(f"part-{part}.safetensors", {name: self.tensors[name] for name in names})
            weight_map |= dict.fromkeys(names, f"part-{part}.safetensors")
        self.write_index(weight_map)
        return weight_map

    def save(self, file: str, tensors: dict[str, Tensor]) -> None:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, self.folder / file)

    def write_index(self, weight_map: object) -> None:
        (self.folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))

    def load(self, **options: Any) -> Model:
        return load_model(self.folder, ops=AtenOps(), **options)

    def refused(self, message: str) -> None:
        with pytest.raises(CheckpointError, match=message) as caught:
            self.load()
        assert "\n" not in str(caught.value)


def flat(model: Model) -> dict[str, Tensor]:
    """All tensors of a model, by a name of its own."""
    weights = model.weights
    found = {name: getattr(weights, name) for name in ("embedding", "norm", "gate_weight", "gate_bias", "lm_head")}
    for index, layer in enumerate(weights.layers):
        found |= {f"{index}.{name}": getattr(layer, name) for name in layer.__slots__}
    return found | {"cos": model.rope.cos, "sin": model.rope.sin}


def assert_same(one: Model, other: Model) -> None:
    first, second = flat(one), flat(other)
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name
