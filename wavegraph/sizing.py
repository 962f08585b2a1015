"""From options and a model to ladders, pools and limits: all of it derived here, so that none can disagree.

The ladders are closed: every row count the scheduler's limits allow has a bucket, because the limits are the
ladders' (core: ``1 .. max_num_batched_tokens``; coda: at most one row per live request).
"""

import logging
from dataclasses import dataclass

import torch

from wavegraph.buckets.ladder import Ladder
from wavegraph.capture.buffers import Limits, page_bytes
from wavegraph.config import DEFAULT_KV_CACHE_BYTES, DEFAULT_MODEL_LEN, EngineConfig
from wavegraph.errors import ConfigError
from wavegraph.model.config import OuroConfig
from wavegraph.scheduler.scheduler import SchedulerConfig

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Sizes:
    """What one engine is built to."""

    ladder: Ladder
    coda_ladder: Ladder
    limits: Limits
    scheduler: SchedulerConfig


def derive(config: EngineConfig, model: OuroConfig, dtype: torch.dtype) -> Sizes:
    """The sizes of an engine. Raises `ConfigError` for options that this model cannot honour.

    A request that does not fit the pool, or a batch below ``max_num_seqs``, is no error: it waits, or is refused
    at the door.
    """
    max_model_len = _wanted_len(config, model)
    num_pages = _num_pages(config, max_model_len, page_bytes(model, config.page_size, dtype))
    if config.max_model_len is None:
        max_model_len = min(max_model_len, num_pages * config.page_size)
        if max_model_len < model.max_position_embeddings:
            logger.warning(
                "max_model_len is %d, not the model's %d: give max_model_len, and a pool that holds it, for more",
                max_model_len,
                model.max_position_embeddings,
            )
    scheduler = SchedulerConfig(
        depths=model.total_ut_steps,
        page_size=config.page_size,
        num_pages=num_pages,
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.row_budget,
        prefill_chunk_size=config.prefill_chunk_size,
        wavefront=config.wavefront,
    )
    ladder = Ladder(config.buckets) if config.buckets is not None else Ladder.default(config.row_budget)
    coda_ladder = Ladder.default(min(config.max_num_seqs, config.row_budget))
    limits = Limits(
        max_rows=ladder.max,
        max_coda_rows=coda_ladder.max,
        max_spans=min(config.row_budget, config.max_num_seqs * model.total_ut_steps),
        max_num_seqs=config.max_num_seqs,
        max_model_len=max_model_len,
        page_size=config.page_size,
        num_pages=num_pages,
    )
    return Sizes(ladder, coda_ladder, limits, scheduler)


def _wanted_len(config: EngineConfig, model: OuroConfig) -> int:
    if config.max_model_len is None:
        return min(model.max_position_embeddings, DEFAULT_MODEL_LEN)
    if config.max_model_len > model.max_position_embeddings:
        raise ConfigError(
            f"max_model_len={config.max_model_len} exceeds the model's max_position_embeddings="
            f"{model.max_position_embeddings}; lower it"
        )
    return config.max_model_len


def _num_pages(config: EngineConfig, max_model_len: int, bytes_per_page: int) -> int:
    """Pages of the pool: as told, or enough for every request at full length within the default bytes."""
    if config.num_pages is not None:
        return config.num_pages
    enough = config.max_num_seqs * -(-max_model_len // config.page_size)
    if config.kv_cache_bytes is None:
        return max(1, min(enough, DEFAULT_KV_CACHE_BYTES // bytes_per_page))
    if config.kv_cache_bytes < bytes_per_page:
        raise ConfigError(
            f"kv_cache_bytes={config.kv_cache_bytes} holds no page: one of page_size={config.page_size} takes "
            f"{bytes_per_page} bytes; raise it, or lower page_size"
        )
    return min(enough, config.kv_cache_bytes // bytes_per_page)
