"""The C++ operators against eager modules, interleaved in one process: one pass of an Ouro-shaped core.

Run: ``python benchmarks/ops.py [--dtype bfloat16] [--isa NAME] [--rows 1,16,64,256]``. Rows are chunks of 16 that end
at position 256. The eager side has its keys lie contiguous (no gathering of pages), which favours it. Prints a table
and one line of JSON; `weights_gbs` is the weights' size over the time of a pass, to be held against `read_gbs`.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from wavegraph.model.config import OuroConfig
from wavegraph.model.core import core
from wavegraph.model.io import Pools, StepIO, Workspace
from wavegraph.model.ops.cpu import CpuOps
from wavegraph.model.weights import Model, model_from_tensors, random_weights

CONTEXT, CHUNK, PAGE = 256, 16, 16
HEADS, DIM, LAYERS = 8, 128, 8
CONFIG = {
    "model_type": "ouro", "hidden_act": "silu", "vocab_size": 256, "hidden_size": HEADS * DIM,
    "intermediate_size": 2816, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS, "head_dim": DIM, "total_ut_steps": 1, "rope_theta": 1e6, "rms_norm_eps": 1e-6,
    "max_position_embeddings": CONTEXT, "tie_word_embeddings": True, "early_exit_threshold": 1.0,
    "eos_token_id": 0, "torch_dtype": "bfloat16",
}  # fmt: skip


def own_pass(model: Model, rows: int) -> Callable[[], object]:
    count = min(rows, CHUNK)
    slots, blocks = rows // count, CONTEXT // PAGE

    def ints(*shape: int, fill: int = 0) -> Tensor:
        return torch.full(shape, fill, dtype=torch.int32)

    def floats(*shape: int) -> Tensor:
        return torch.randn(shape).to(model.dtype)

    io = StepIO(
        header=ints(8),
        span_slot=torch.arange(slots, dtype=torch.int32),
        span_start=ints(slots, fill=CONTEXT - count),
        span_count=ints(slots, fill=count),
        span_depth=ints(slots),
        **{f"token_{name}": ints(1, fill=slots if name == "slot" else 0) for name in ("slot", "pos", "id")},
        **{f"page_{name}": ints(1, fill=slots if name == "slot" else 0) for name in ("slot", "index", "id")},
        **{f"coda_{name}": ints(1, fill=slots if name == "slot" else 0) for name in ("slot", "pos")},
        token_table=ints(slots + 1, CONTEXT + 1),
        page_table=torch.arange((slots + 1) * blocks, dtype=torch.int32).view(-1, blocks),
        **{f"row_{name}": ints(rows) for name in ("slot", "pos", "depth", "page", "offset")},
        gate_logits=torch.zeros(rows),
        logits=floats(1, 256),
        coda_token=ints(1),
    )
    pages = (slots + 1) * blocks
    plane = (pages, 1, LAYERS, PAGE, HEADS, DIM)
    pools = Pools(floats(*plane), floats(*plane), floats(pages, PAGE, HEADS * DIM))
    widths = (HEADS * DIM, HEADS * DIM, HEADS * DIM, 3 * HEADS * DIM, HEADS * DIM, 2816, HEADS * DIM)
    work = Workspace(*(floats(rows, width) for width in widths))
    return lambda: core(model, io, pools, work, rows)


def rms(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * weight


def eager_pass(weights: dict[str, Tensor], model: Model, rows: int) -> Callable[[], object]:
    count = min(rows, CHUNK)
    size = (LAYERS, rows // count, HEADS, CONTEXT, DIM)
    keys, values = torch.randn(size).to(model.dtype), torch.randn(size).to(model.dtype)
    start = torch.randn(rows // count, count, HEADS * DIM).to(model.dtype)
    where = torch.arange(CONTEXT - count, CONTEXT)
    mask = torch.arange(CONTEXT)[None] <= where[:, None]
    cos, sin = model.rope.cos[where], model.rope.sin[where]
    layers = []
    for layer in range(LAYERS):
        w = {key.split(f"layers.{layer}.")[1]: value for key, value in weights.items() if f"layers.{layer}." in key}
        qkv = torch.cat([w[f"self_attn.{part}_proj.weight"] for part in "qkv"])
        layers.append((w, qkv, torch.cat([w["mlp.gate_proj.weight"], w["mlp.up_proj.weight"]])))

    def rotate(x: Tensor) -> Tensor:
        return x * cos + torch.cat((-x[..., DIM // 2 :], x[..., : DIM // 2]), -1) * sin

    def run() -> Tensor:
        x = start
        for (w, qkv, gate_up), k_cache, v_cache in zip(layers, keys, values, strict=True):
            h = functional.linear(rms(x, w["input_layernorm.weight"]), qkv)
            q, k, v = h.unflatten(-1, (3, HEADS, DIM)).permute(2, 0, 3, 1, 4)
            k_cache[:, :, where], v_cache[:, :, where] = rotate(k), v
            h = functional.scaled_dot_product_attention(rotate(q), k_cache, v_cache, attn_mask=mask)
            h = functional.linear(h.transpose(1, 2).flatten(2), w["self_attn.o_proj.weight"])
            x = x + rms(h, w["input_layernorm_2.weight"])
            gate, up = functional.linear(rms(x, w["post_attention_layernorm.weight"]), gate_up).chunk(2, -1)
            h = functional.linear(functional.silu(gate) * up, w["mlp.down_proj.weight"])
            x = x + rms(h, w["post_attention_layernorm_2.weight"])
        return rms(x, weights["model.norm.weight"])

    return run


def milliseconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) * 1e3


def read_rate() -> float:
    """GB/s of summing 256 MB on all threads."""
    data = torch.ones(64 << 20)
    return data.nbytes / min(milliseconds(data.sum) for _ in range(5)) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--isa")
    parser.add_argument("--rows", default="1,16,64,256")
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    dtype = getattr(torch, options.dtype)
    config = OuroConfig.from_dict(CONFIG)
    weights = dict(random_weights(config, 0, dtype))
    ops = CpuOps(options.isa)
    model = model_from_tensors(config, weights, ops=ops, dtype=dtype)
    nbytes = sum(value.nbytes for key, value in weights.items() if "_proj" in key)
    table = []
    print(f"{'rows':>5} {'eager ms':>9} {'own ms':>8} {'ratio':>6} {'weights GB/s':>13} {'TFLOP/s':>8}")
    for rows in (int(part) for part in options.rows.split(",")):
        sides = (eager_pass(weights, model, rows), own_pass(model, rows))
        times = [[milliseconds(side) for side in sides] for _ in range(options.repeats + 2)][2:]
        eager, own = (statistics.median(column) for column in zip(*times, strict=True))
        tflops = 2 * rows * nbytes / dtype.itemsize / own / 1e9
        table.append(
            {"rows": rows, "eager_ms": eager, "own_ms": own, "weights_gbs": nbytes / own / 1e6, "tflops": tflops}
        )
        print(f"{rows:5} {eager:9.2f} {own:8.2f} {eager / own:6.2f} {nbytes / own / 1e6:13.1f} {tflops:8.3f}")
    facts = {"dtype": options.dtype, "isa": ops.isa, "threads": torch.get_num_threads(), "read_gbs": read_rate()}
    print(json.dumps(facts | {"core": table}))


if __name__ == "__main__":
    main()
