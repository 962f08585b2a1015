"""Kernels at Ouro-1.4B's page size, on pages so far into the pool that 32-bit offsets have overflowed."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from tests.model.cpu_step import NAN
from wavegraph.capture.buffers import Limits, build_pools, build_step_buffers, build_workspace
from wavegraph.model.config import OuroConfig
from wavegraph.model.io import Pools, Workspace
from wavegraph.model.ops.triton.launch import JitLauncher
from wavegraph.model.ops.triton.ops import TritonOps

PAGES = 760
FIRST = 702
LAYER, DEPTH, CONTEXT = 23, 3, 300
"""32-bit offsets end at page 682: a page has 3.1 M elements of K."""


@cache
def config() -> OuroConfig:
    raw = {
        "model_type": "ouro", "hidden_act": "silu", "vocab_size": 1024, "hidden_size": 2048, "intermediate_size": 5632,
        "num_hidden_layers": 24, "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 128,
        "total_ut_steps": 4, "rope_theta": 1e6, "rms_norm_eps": 1e-6, "max_position_embeddings": 1024,
        "tie_word_embeddings": False, "early_exit_threshold": 1.0, "eos_token_id": 0,
    }  # fmt: skip
    return OuroConfig.from_dict(raw)


class Far:
    """One request whose pages are the last ones of the pool; everything not written is NaN."""

    def __init__(self, rows: int) -> None:
        self.ops = TritonOps(JitLauncher())
        limits = Limits(
            max_num_seqs=1, max_spans=4, max_rows=rows, max_coda_rows=4, max_model_len=1024, page_size=16,
            num_pages=PAGES,
        )  # fmt: skip
        device = torch.device("cuda", 0)
        self.pools: Pools = build_pools(config(), limits, torch.bfloat16, device, torch.empty)
        for pool in (self.pools.k, self.pools.v, self.pools.hidden, self.pools.gate):
            pool.fill_(NAN)
        self.work: Workspace = build_workspace(config(), limits, torch.bfloat16, device)
        io = build_step_buffers(config(), limits, limits.layout(), torch.bfloat16, device).io
        words = self.ops.scratch_size(io, self.pools, self.work)
        self.io = replace(io, scratch=torch.full((words,), -1, dtype=torch.int32, device=device))
        count = PAGES - FIRST
        self.pages = FIRST + torch.randperm(count, generator=torch.Generator().manual_seed(1))
        self.io.page_table[0, :count] = self.pages.to(device, torch.int32)

    def span(self, start: int, count: int) -> None:
        io = self.io
        for name, value in (("slot", 0), ("start", start), ("count", count), ("depth", DEPTH)):
            getattr(io, f"span_{name}")[0] = value
        self.ops.prepare(io, self.pools, count)

    def at(self, pool: Tensor, pos: int) -> Tensor:
        page = int(self.pages[pos // 16])
        return pool[page, DEPTH, LAYER, pos % 16] if pool.dim() == 6 else pool[page, pos % 16]


@pytest.fixture(scope="module")
def far() -> Far:
    return Far(32)


def relative(got: Tensor, expected: Tensor) -> float:
    return float((got.double().cpu() - expected.double().cpu()).norm() / expected.double().norm())


def test_keys_and_values_are_written_and_attended(far: Far) -> None:
    """RoPE and the KV write of a chunk, then attention of it over all pages, against float64."""
    ops, io, pools = far.ops, far.io, far.pools
    generator = torch.Generator("cuda").manual_seed(2)
    keys, values = (torch.randn(CONTEXT, 16, 128, device="cuda", generator=generator).bfloat16() for _ in range(2))
    for pos in range(CONTEXT - 32):
        far.at(pools.k, pos).copy_(keys[pos])
        far.at(pools.v, pos).copy_(values[pos])
    far.span(CONTEXT - 32, 32)
    qkv = torch.randn(32, 3 * 2048, device="cuda", generator=generator).bfloat16()
    qkv[:, 2048:4096] = keys[-32:].flatten(1)
    qkv[:, 4096:] = values[-32:].flatten(1)
    cos, sin = torch.ones(1024, 128, device="cuda").bfloat16(), torch.zeros(1024, 128, device="cuda").bfloat16()
    ops.rope_write(qkv, io, pools, cos, sin, LAYER, 32)
    for pos in range(CONTEXT - 32, CONTEXT):
        assert torch.equal(far.at(pools.k, pos), keys[pos])
        assert torch.equal(far.at(pools.v, pos), values[pos])
    out = torch.full((32, 2048), NAN, device="cuda", dtype=torch.bfloat16)
    ops.attention(out, qkv, io, pools, LAYER, 32)
    query = qkv[:, :2048].double().view(32, 16, 128)
    scores = torch.einsum("rhd,phd->rhp", query, keys.double()) / 128**0.5
    positions = torch.arange(CONTEXT, device="cuda")
    future = positions[None] > positions[-32:, None]
    weights = scores.masked_fill(future[:, None], -torch.inf).softmax(-1)
    expected = torch.einsum("rhp,phd->rhd", weights, values.double()).flatten(1)
    assert relative(out, expected) < 1e-2


def test_hidden_rows_and_gates_go_there_and_come_back(far: Far) -> None:
    ops, io, pools = far.ops, far.io, far.pools
    far.span(100, 32)
    generator = torch.Generator("cuda").manual_seed(3)
    state = torch.randn(32, 2048, device="cuda", generator=generator).bfloat16()
    weight = torch.randn(2048, device="cuda", generator=generator).bfloat16()
    bias = torch.zeros(1, device="cuda").bfloat16()
    ops.scatter_gate(state, io, pools, weight, bias, 32)
    gathered = torch.full((32, 2048), NAN, device="cuda", dtype=torch.bfloat16)
    ops.gather(gathered, io, pools, torch.zeros(1024, 2048, device="cuda").bfloat16(), 32)
    assert torch.equal(gathered, state)
    gates = torch.stack([far.at(pools.gate, pos)[DEPTH] for pos in range(100, 132)])
    assert relative(gates, state.double() @ weight.double()) < 1e-2
