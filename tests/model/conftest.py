"""Goldens, small models, and a driver that runs CORE and CODA by hand, with no scheduler and no executor."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.model.checkpoints import Checkpoint
from wavegraph.model.config import OuroConfig
from wavegraph.model.core import coda, coda_full, core
from wavegraph.model.io import Pools, StepIO, Workspace
from wavegraph.model.ops.aten import AtenOps
from wavegraph.model.ops.base import Ops
from wavegraph.model.ops.cpu import CpuOps
from wavegraph.model.sampling import MAX_TOP_LOGPROBS, PARAMS_WIDTH, Action, encode_params
from wavegraph.model.weights import Model

GOLDENS = Path(__file__).parents[1] / "goldens"
NAN = float("nan")

Span = tuple[int, int, int, int]

PARAM_UPDATES = 4


@pytest.fixture(autouse=True)
def _single_thread_without_gradients() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.no_grad():
        yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def goldens() -> Path:
    """The folder of golden checkpoints and results."""
    return GOLDENS


@pytest.fixture(scope="session")
def golden() -> Callable[[str], dict[str, np.ndarray[Any, Any]]]:
    """Reads the golden results of a checkpoint by name."""

    def read(name: str) -> dict[str, np.ndarray[Any, Any]]:
        with np.load(GOLDENS / f"{name}_fp32.npz") as arrays:
            return dict(arrays)

    return read


def tiny_raw(**changes: Any) -> dict[str, Any]:
    """A small, complete ``config.json``; the value ``...`` removes a key."""
    raw: dict[str, Any] = {
        "model_type": "ouro",
        "hidden_act": "silu",
        "vocab_size": 97,
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "total_ut_steps": 3,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
        "early_exit_threshold": 1.0,
        "eos_token_id": 0,
        "torch_dtype": "float32",
    } | changes
    return {key: value for key, value in raw.items() if value is not ...}


@pytest.fixture(scope="session")
def raw_config() -> Callable[..., dict[str, Any]]:
    """Makes a small, valid ``config.json`` as a dict, with changes; ``...`` removes a key."""
    return tiny_raw


@pytest.fixture(scope="session")
def small_config() -> Callable[..., OuroConfig]:
    """Makes a small `OuroConfig`, with changes."""
    return lambda **changes: OuroConfig.from_dict(tiny_raw(**changes))


class Driver:
    """Static tensors of one engine, filled by hand. Everything that is not written yet is NaN or garbage.

    A coda row is ``(slot, position)``, with depth and `Action` after it if these are not the last and ``SAMPLE``.
    Requests draw greedily until told otherwise.

    Slots ``0..slots - 1`` are requests, ``slots`` is scratch. Pages are handed out in a shuffled order, so
    that neighbours in a request are not neighbours in the pool.
    """

    def __init__(
        self,
        model: Model,
        *,
        slots: int = 3,
        max_len: int = 64,
        page_size: int = 4,
        rows: int = 64,
        coda_rows: int = 8,
        spans: int = 16,
        seed: int = 0,
    ) -> None:
        config = model.config
        self.model, self.slots, self.page_size = model, slots, page_size
        self.blocks = -(-max_len // page_size)
        self.scratch_page = slots * self.blocks
        self.free = list(range(self.scratch_page))
        random.Random(seed).shuffle(self.free)
        self.pages: dict[tuple[int, int], int] = {}
        heads = (config.num_key_value_heads, config.head_dim)

        def ints(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32)

        def floats(*shape: int, dtype: torch.dtype = model.dtype) -> Tensor:
            return torch.full(shape, NAN, dtype=dtype)

        plane = (self.scratch_page + 1, config.total_ut_steps, config.num_hidden_layers, page_size, *heads)
        self.pools = Pools(
            k=floats(*plane),
            v=floats(*plane),
            hidden=floats(self.scratch_page + 1, page_size, config.hidden_size),
            gate=floats(self.scratch_page + 1, page_size, config.total_ut_steps, dtype=torch.float32),
        )
        self.work = Workspace(
            x=floats(rows, config.hidden_size),
            normed=floats(rows, config.hidden_size),
            branch=floats(rows, config.hidden_size),
            qkv=floats(rows, config.q_size + 2 * config.kv_size),
            attn=floats(rows, config.q_size),
            mlp=floats(rows, config.intermediate_size),
            coda_x=floats(coda_rows, config.hidden_size),
        )
        self.io = StepIO(
            header=ints(8),
            **{f"span_{field}": ints(spans) for field in ("slot", "start", "count", "depth")},
            **{f"token_{field}": ints(rows) for field in ("slot", "pos", "id")},
            **{f"page_{field}": ints(rows) for field in ("slot", "index", "id")},
            param_slot=ints(PARAM_UPDATES),
            param_rows=ints(PARAM_UPDATES, PARAMS_WIDTH),
            **{f"coda_{field}": ints(coda_rows) for field in ("slot", "pos", "depth", "action")},
            token_table=ints(slots + 1, max_len + 1),
            page_table=torch.full((slots + 1, self.blocks), self.scratch_page, dtype=torch.int32),
            params=torch.full((slots + 1, PARAMS_WIDTH), -1, dtype=torch.int32),
            **{f"row_{field}": ints(rows) for field in ("slot", "pos", "depth", "page", "offset")},
            logits=floats(coda_rows, config.vocab_size),
            coda_left=ints(coda_rows),
            coda_token=ints(coda_rows),
            coda_logprob=floats(coda_rows, dtype=torch.float32),
            coda_rank=ints(coda_rows),
            top_ids=ints(coda_rows, min(MAX_TOP_LOGPROBS, config.vocab_size)),
            top_logprobs=floats(coda_rows, min(MAX_TOP_LOGPROBS, config.vocab_size), dtype=torch.float32),
        )
        self.io.params[:slots] = torch.tensor(encode_params(), dtype=torch.int32)
        words = model.ops.scratch_size(self.io, self.pools, self.work)
        self.io = replace(self.io, scratch=ints(words).fill_(-1))

    def _set(self, prefix: str, fields: Sequence[str], entries: Sequence[Sequence[int]], fill: dict[str, int]) -> None:
        for index, field in enumerate(fields):
            tensor: Tensor = getattr(self.io, prefix + field)
            tensor.fill_(fill.get(field, 0))
            tensor[: len(entries)] = torch.tensor([entry[index] for entry in entries], dtype=torch.int32)

    def page(self, slot: int, pos: int) -> int:
        """Page of a position of a request that has one."""
        return self.pages[slot, pos // self.page_size]

    def fill_inputs(
        self,
        spans: Sequence[Span],
        tokens: Sequence[tuple[int, int, int]] = (),
        coda_rows: Sequence[tuple[int, ...]] = (),
        params: Sequence[tuple[int, Sequence[int]]] = (),
    ) -> None:
        """Write one step's inputs, with a page update for every block that a span is first to touch."""
        updates = []
        for slot, start, count, _ in spans:
            for block in range(start // self.page_size, (start + count - 1) // self.page_size + 1):
                if (slot, block) not in self.pages:
                    self.pages[slot, block] = self.free.pop()
                    updates.append((slot, block, self.pages[slot, block]))
        scratch = {"slot": self.slots}
        self._set("span_", ("slot", "start", "count", "depth"), spans, scratch)
        self._set("token_", ("slot", "pos", "id"), tokens, scratch)
        self._set("page_", ("slot", "index", "id"), updates, scratch | {"id": self.scratch_page})
        last = self.model.config.total_ut_steps - 1
        rows = [(*row, *(last, Action.SAMPLE)[len(row) - 2 :]) for row in coda_rows]
        self._set("coda_", ("slot", "pos", "depth", "action"), rows, scratch | {"action": Action.SCORE})
        self._set("param_", ("slot",), [(slot,) for slot, _ in params], scratch)
        for index, (_, row) in enumerate(params):
            self.io.param_rows[index] = torch.tensor(row, dtype=torch.int32)

    def step(
        self,
        spans: Sequence[Span],
        *,
        tokens: Sequence[tuple[int, int, int]] = (),
        bucket: int | None = None,
        coda_rows: Sequence[tuple[int, ...]] = (),
        coda_bucket: int | None = None,
        params: Sequence[tuple[int, Sequence[int]]] = (),
        full: bool = False,
    ) -> list[int]:
        """One step at ``bucket`` rows (default: as many as live). Returns the sampled tokens."""
        self.fill_inputs(spans, tokens, coda_rows, params)
        live = sum(span[2] for span in spans)
        core(self.model, self.io, self.pools, self.work, bucket or live)
        if coda_rows:
            program = coda_full if full else coda
            program(self.model, self.io, self.pools, self.work, coda_bucket or len(coda_rows))
        return self.io.coda_token[: len(coda_rows)].tolist()

    def prefill(self, slot: int, prompt: Sequence[int], chunk: int, *, padding: int = 0) -> int:
        """Ordinary prefill, chunk by chunk through all depths. Returns the first token."""
        sampled: list[int] = []
        for start in range(0, len(prompt), chunk):
            part = prompt[start : start + chunk]
            tokens = [(slot, start + index, token) for index, token in enumerate(part)]
            for depth in range(self.model.config.total_ut_steps):
                last = start + len(part) == len(prompt) and depth == self.model.config.total_ut_steps - 1
                sampled = self.step(
                    [(slot, start, len(part), depth)],
                    tokens=tokens if depth == 0 else (),
                    bucket=len(part) + padding,
                    coda_rows=[(slot, len(prompt) - 1)] if last else (),
                )
        return sampled[0]

    def release(self, slot: int) -> None:
        """Free a request's pages and poison them. The device's page table keeps its stale entries."""
        for key in [key for key in self.pages if key[0] == slot]:
            page = self.pages.pop(key)
            for pool in (self.pools.k, self.pools.v, self.pools.hidden, self.pools.gate):
                pool[page] = NAN
            self.free.insert(0, page)

    def hidden(self, slot: int, start: int, stop: int) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Hidden rows of positions ``start..stop - 1``."""
        rows = [self.pools.hidden[self.page(slot, pos), pos % self.page_size] for pos in range(start, stop)]
        return torch.stack(rows).double().numpy()

    def gates(self, slot: int, start: int, stop: int) -> Tensor:
        """Gate logits ``[stop - start, D]`` of positions ``start..stop - 1``."""
        return torch.stack([self.pools.gate[self.page(slot, pos), pos % self.page_size] for pos in range(start, stop)])

    def kv(self, slot: int, stop: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """K and V of positions ``0..stop - 1`` as ``[depth * layers + layer, kv heads, stop, d]``."""
        planes = []
        for pool in (self.pools.k, self.pools.v):
            rows = [pool[self.page(slot, pos), :, :, pos % self.page_size] for pos in range(stop)]
            planes.append(torch.stack(rows, dim=3).flatten(0, 1).double().numpy())
        return planes[0], planes[1]


@pytest.fixture(scope="session", params=["aten", "cpu"])
def ops(request: pytest.FixtureRequest) -> Ops:
    """Each set of operators that runs on a CPU."""
    return AtenOps() if request.param == "aten" else CpuOps()


@pytest.fixture(scope="session")
def make_driver() -> type[Driver]:
    """Makes a `Driver` around a model."""
    return Driver


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    """A small random checkpoint in a folder of its own."""
    return Checkpoint(tmp_path / "checkpoint", tiny_raw())
