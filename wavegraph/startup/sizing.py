"""From options and a model to ladders, pools and limits: all of it derived here, so that none can disagree.

The ladders are closed: every row count the scheduler's limits allow has a bucket, because the limits are the
ladders' (core: ``1 .. max_num_batched_tokens``; coda: at most one row per live request).
"""

import json
import logging
import os
from dataclasses import asdict
from hashlib import sha256

import torch

from wavegraph.buckets.ladder import Ladder
from wavegraph.capture.buffers import Limits, page_bytes
from wavegraph.config import DEFAULT_KV_CACHE_BYTES, DEFAULT_MODEL_LEN, POOL_SIZES, EngineConfig
from wavegraph.engine.sizes import Sizes
from wavegraph.errors import ConfigError
from wavegraph.model.config import OuroConfig
from wavegraph.model.sampling import PARAMS_WIDTH
from wavegraph.scheduler.admission import Fcfs, Priority
from wavegraph.scheduler.config import SchedulerConfig
from wavegraph.scheduler.order import DecodeFirst, Fifo, Refill, StagePolicy

logger = logging.getLogger(__name__)


def derive(
    config: EngineConfig,
    model: OuroConfig,
    dtype: torch.dtype,
    *,
    dense_attention: bool = True,
    memory: int | None = None,
) -> Sizes:
    """The sizes of an engine. Raises `ConfigError` for options that this model cannot honour.

    ``dense_attention`` is that of the operators in use: a length that nobody asked for is then kept short. ``memory``
    is the bytes of the GPU that is to hold it all; None is this machine's memory, of which a pool that nobody sized
    takes only a part.

    A request that does not fit the pool, or a batch below ``max_num_seqs``, is no error: it waits, or is refused
    at the door.
    """
    max_model_len = _wanted_len(config, model, dense_attention)
    num_pages = _num_pages(config, max_model_len, page_bytes(model, config.page_size, dtype), memory)
    if config.max_model_len is None:
        max_model_len = min(max_model_len, num_pages * config.page_size)
        if max_model_len < model.max_position_embeddings:
            logger.warning(
                "max_model_len is %d, not the model's %d: give max_model_len, and a pool that holds it, for more",
                max_model_len,
                model.max_position_embeddings,
            )
    # On a GPU a pool that nobody sized takes what is left in the end.
    pool_pages = num_pages if memory is None or any(getattr(config, name) is not None for name in POOL_SIZES) else 1
    _check_memory(config, model, dtype, max_model_len, pool_pages, memory)
    scheduler = SchedulerConfig(
        depths=model.total_ut_steps,
        page_size=config.page_size,
        num_pages=num_pages,
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.row_budget,
        prefill_chunk_size=None if config.prefill_chunk_size == "auto" else config.prefill_chunk_size,
        packing=config.packing,
        target_step_seconds=_step_seconds(config, model),
        wavefront=config.wavefront,
        fused=config.step_mix == "fused",
        max_coda_rows=_coda_rows(config),
        stage_policy=_stage_policy(config),
        ranking=Priority() if config.admission_order == "priority" else Fcfs(),
        max_bypass=config.max_bypass,
        refill=config.refill,
        prefix_cache=config.prefix_cache,
        reserve_worst_case=config.admission == "worst_case",
        swap_pages=config.swap_bytes // page_bytes(model, config.page_size, dtype),
    )
    ladder = Ladder(config.buckets) if config.buckets is not None else Ladder.default(config.row_budget)
    coda_ladder = Ladder.default(_coda_rows(config))
    limits = Limits(
        max_rows=ladder.max,
        max_coda_rows=coda_ladder.max,
        max_spans=min(config.row_budget, config.max_num_seqs * model.total_ut_steps),
        max_num_seqs=config.max_num_seqs,
        max_model_len=max_model_len,
        page_size=config.page_size,
        num_pages=num_pages,
    )
    return Sizes(ladder, coda_ladder, limits, scheduler, _compatibility(config, model, dtype))


def _coda_rows(config: EngineConfig) -> int:
    """A step draws at most one token for each running request that has a row in it."""
    return min(config.max_num_seqs, config.row_budget)


def _step_seconds(config: EngineConfig, model: OuroConfig) -> float | None:
    """A token at full depth takes a step for each loop."""
    return None if config.target_itl_ms is None else config.target_itl_ms / 1000 / model.total_ut_steps


def _stage_policy(config: EngineConfig) -> StagePolicy:
    if config.stage_policy == "refill":
        return Refill(config.max_prefill_steps_before_decode)
    return Fifo() if config.stage_policy == "fifo" else DecodeFirst(config.max_decode_steps_before_prefill)


def _compatibility(config: EngineConfig, model: OuroConfig, dtype: torch.dtype) -> str:
    facts = {"model": asdict(model), "dtype": str(dtype), "page_size": config.page_size, "kv_layout": config.kv_layout}
    return sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _wanted_len(config: EngineConfig, model: OuroConfig, dense_attention: bool) -> int:
    if config.max_model_len is None:
        most = model.max_position_embeddings
        return min(most, DEFAULT_MODEL_LEN) if dense_attention else most
    if config.max_model_len > model.max_position_embeddings:
        raise ConfigError(
            f"max_model_len={config.max_model_len} exceeds the model's max_position_embeddings="
            f"{model.max_position_embeddings}; lower it"
        )
    return config.max_model_len


def memory_bytes() -> int:
    """Physical memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _check_memory(
    config: EngineConfig, model: OuroConfig, dtype: torch.dtype, max_model_len: int, num_pages: int, gpu: int | None
) -> None:
    """Refuse what the machine or GPU cannot hold, before any of it is built: the largest parts, with their options."""
    memory, place = (memory_bytes(), "machine") if gpu is None else (gpu, "GPU")
    coda = _coda_rows(config)
    pool = (num_pages + 1) * page_bytes(model, config.page_size, dtype)
    slot_ints = max_model_len + 1 + -(-max_model_len // config.page_size) + PARAMS_WIDTH
    tables = (config.max_num_seqs + 1) * slot_ints * torch.int32.itemsize
    features = 3 * model.hidden_size + 2 * (model.q_size + model.kv_size) + model.intermediate_size
    step = (config.row_budget * features + coda * model.vocab_size) * dtype.itemsize
    for what, needed, way_out in (
        ("the KV pool", pool, "lower num_pages or kv_cache_bytes, or page_size"),
        ("the tables of requests", tables, "lower max_num_seqs or max_model_len"),
        ("the buffers of a step", step, "lower max_num_batched_tokens or the largest of buckets, or max_num_seqs"),
        ("pool, tables and buffers", pool + tables + step, "lower kv_cache_bytes (or num_pages), or max_num_seqs"),
    ):
        if needed > memory:
            raise ConfigError(f"{what} would take {needed} bytes, but this {place} has {memory}; {way_out}")


def _num_pages(config: EngineConfig, max_model_len: int, bytes_per_page: int, gpu: int | None) -> int:
    """Pages of the pool: as told, or enough for every request at full length within the default bytes, or the GPU's."""
    if config.num_pages is not None:
        return config.num_pages
    enough = config.max_num_seqs * -(-max_model_len // config.page_size)
    if config.kv_cache_fraction is not None:
        given, size = (
            f"kv_cache_fraction={config.kv_cache_fraction}",
            int((memory_bytes() if gpu is None else gpu) * config.kv_cache_fraction),
        )
    elif config.kv_cache_bytes is not None:
        given, size = f"kv_cache_bytes={config.kv_cache_bytes}", config.kv_cache_bytes
    else:
        most = min(DEFAULT_KV_CACHE_BYTES, memory_bytes() // 2) if gpu is None else gpu
        return max(1, min(enough, most // bytes_per_page))
    if size < bytes_per_page:
        raise ConfigError(
            f"{given} holds no page: one of page_size={config.page_size} takes {bytes_per_page} bytes; raise it, or "
            "lower page_size"
        )
    return min(enough, size // bytes_per_page)
