"""New weights in the memory of the old: recordings stay valid, and compute what a new model would."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.capture.driver import Driver, make_executor, tiny_config, tiny_model
from tests.capture.verify import bits
from wavegraph.errors import CheckpointError, EngineError
from wavegraph.model.ops.aten import AtenOps
from wavegraph.model.ops.cpu import CpuOps
from wavegraph.model.weights import Model, model_from_tensors, random_weights

PROMPT = [3, 9, 27, 11, 60, 2, 5]
Named = dict[str, Tensor]


class PackingOps(AtenOps):
    """Packs linears into copies of another layout, as operator sets with kernels of their own do."""

    def pack_linear(self, weight: Tensor) -> Tensor:
        return weight.t().contiguous()

    def linear(self, out: Tensor, x: Tensor, weight: Tensor, rows: int) -> None:
        torch.mm(x[:rows], weight, out=out[:rows])


def run(driver: Driver) -> tuple[list[int], dict[tuple[int, int, int], Tensor], Tensor]:
    driver.add(0, PROMPT)
    tokens = driver.generate(4, chunk=3, budget=8)[0]
    return tokens, dict(driver.gates), driver.logits[0, len(PROMPT)]


def storages(model: Model) -> list[tuple[int, Tensor]]:
    weights = model.weights
    found = [weights.embedding, weights.norm, weights.gate_weight, weights.gate_bias, weights.lm_head]
    found += [getattr(layer, name) for layer in weights.layers for name in layer.__slots__]
    return [(tensor.data_ptr(), bits(tensor)) for tensor in found]


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("make_ops", [AtenOps, PackingOps, CpuOps], ids=["as they are", "packed", "C++"])
@pytest.mark.parametrize(
    ("dtype", "given", "tied"),
    [
        (torch.float32, torch.float32, False),
        (torch.float32, torch.float32, True),
        (torch.bfloat16, torch.float32, False),
    ],
    ids=["float32", "tied", "converted"],
)
def test_equals_a_new_model(
    dtype: torch.dtype, given: torch.dtype, tied: bool, make_ops: type[AtenOps | CpuOps], asynchronous: bool
) -> None:
    config, ops = tiny_config(tie_word_embeddings=tied), make_ops()
    old, new = (dict(random_weights(config, seed, given)) for seed in (1, 2))
    model = model_from_tensors(config, old, ops=ops, dtype=dtype)
    driver = Driver(make_executor(model, "recorded", asynchronous=asynchronous))
    before = run(driver)
    addresses = [address for address, _ in storages(model)]
    driver.executor.update_weights(new)
    assert [address for address, _ in storages(model)] == addresses
    after = run(driver)
    fresh = model_from_tensors(config, new, ops=ops, dtype=dtype)
    assert all(torch.equal(one[1], two[1]) for one, two in zip(storages(model), storages(fresh), strict=True))
    tokens, gates, logits = run(Driver(make_executor(fresh, "recorded")))
    assert after[0] == tokens != before[0]
    assert torch.equal(bits(after[2]), bits(logits))
    assert all(torch.equal(bits(after[1][key]), bits(gate)) for key, gate in gates.items())
    driver.executor.close()


def test_a_models_own_tensors_may_be_given() -> None:
    """Weights that are views of what they are copied into."""
    config = tiny_config()
    tensors = dict(random_weights(config, 1))
    model = model_from_tensors(config, tensors, ops=AtenOps(), dtype=torch.float32)
    before = storages(model)
    tensors["model.embed_tokens.weight"] = model.weights.embedding
    tensors["model.layers.0.self_attn.q_proj.weight"] = model.weights.layers[0].qkv[: config.q_size]
    model.load_(tensors)
    assert all(torch.equal(one[1], two[1]) for one, two in zip(storages(model), before, strict=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), r"1 tensor\(s\) that the config asks for are missing, first model"),
        (lambda t: t.update(extra=torch.zeros(1)), r"weights: 1 tensor\(s\) have no place in this model, first extra"),
        (lambda t: t.update({"lm_head.weight": torch.zeros(64, 31)}), r"weights: lm_head\.weight has shape \[64, 31\]"),
        (lambda t: t.update({"lm_head.weight": torch.zeros(64, 32).int()}), r"lm_head\.weight is torch\.int32; give"),
    ],
)  # fmt: skip
def test_nothing_is_written_if_anything_is_wrong(change: Callable[[Named], object], message: str) -> None:
    model = tiny_model()
    executor = make_executor(model, "recorded")
    before = storages(model)
    tensors = dict(random_weights(model.config, 9))
    change(tensors)
    with pytest.raises(CheckpointError, match=message):
        executor.update_weights(tensors)
    assert all(
        one[0] == two[0] and torch.equal(one[1], two[1]) for one, two in zip(storages(model), before, strict=True)
    )
    run(Driver(executor))


def test_refused_after_close() -> None:
    executor = make_executor(tiny_model(), "eager")
    executor.close()
    with pytest.raises(EngineError, match="closed"):
        executor.update_weights({})
