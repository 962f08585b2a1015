"""An engine's sizes, fitted to the memory of a GPU: measured by a trial capture, not guessed."""

import logging
from dataclasses import dataclass, replace

import torch

from wavegraph.buckets.cost import CostModel
from wavegraph.buckets.shortage import extra_seconds, without
from wavegraph.capture.buffers import page_bytes
from wavegraph.capture.device import CudaDevice
from wavegraph.capture.ladder import Progress
from wavegraph.capture.trial import Trial, run_trial
from wavegraph.config import POOL_SIZES, EngineConfig
from wavegraph.engine.sizes import Sizes
from wavegraph.errors import CaptureError, ConfigError
from wavegraph.model.weights import Model
from wavegraph.startup.sizing import derive

logger = logging.getLogger(__name__)

HEADROOM_BYTES = 256 << 20
"""Left free: what rounding, and temporaries outside of recordings, may take."""


@dataclass(frozen=True, slots=True)
class _Bucket:
    """A bucket that can be given up: of which ladder, and what a step loses without it, in seconds a byte."""

    program: str
    rows: int
    loss: float


def fit_to_gpu(
    config: EngineConfig,
    model: Model,
    sizes: Sizes,
    device: CudaDevice,
    cost: CostModel | None = None,
    progress: Progress | None = None,
) -> Sizes:
    """``sizes`` with the pool that fits beside model, buffers and recordings; a pool that was asked for is kept.

    If that pool, or even one page, does not fit, the ladders give up their least valuable buckets, each named in a
    warning. Raises `ConfigError` if it does not fit beside the largest ones alone.
    """
    model_cost = cost if cost is not None else CostModel.assumed(sizes.ladder.max)
    wanted, bytes_per_page = sizes.limits.num_pages, page_bytes(model.config, config.page_size, model.dtype)
    least = wanted if any(getattr(config, name) is not None for name in POOL_SIZES) else 1
    sizes, trial = _trial_that_fits(model, sizes, device, model_cost, progress)
    room = trial.free - trial.needed - HEADROOM_BYTES
    while room < (least + 1) * bytes_per_page:
        victim = _least_valuable(sizes, model_cost, trial)
        if victim is None:
            raise ConfigError(
                f"num_pages: {least} pages of {bytes_per_page} bytes do not fit into the GPU's {trial.free} free bytes "
                f"beside {trial.needed} of buffers and recordings; lower num_pages (or kv_cache_bytes), "
                "max_num_batched_tokens or max_num_seqs"
            )
        room += (trial.core if victim.program == "core" else trial.coda)[victim.rows]
        sizes = _give_up(sizes, victim)
    pages = min(wanted, room // bytes_per_page - 1)
    pool = dict.fromkeys(POOL_SIZES) | {"num_pages": pages}
    fitted = replace(config, buckets=sizes.ladder.sizes, **pool)  # type: ignore[arg-type]
    total = device.memory().total
    again = derive(fitted, model.config, model.dtype, dense_attention=model.ops.dense_attention, memory=total)
    return replace(again, coda_ladder=sizes.coda_ladder)


def _trial_that_fits(
    model: Model, sizes: Sizes, device: CudaDevice, cost: CostModel, progress: Progress | None
) -> tuple[Sizes, Trial]:
    """A trial, with fewer buckets if memory is too short even for that."""
    while True:
        try:
            return sizes, run_trial(model, sizes.limits, sizes.ladder, sizes.coda_ladder, device, progress)
        except CaptureError as error:
            victim = _least_valuable(sizes, cost, None)
            if not isinstance(error.__cause__, torch.OutOfMemoryError) or victim is None:
                raise
        sizes = _give_up(sizes, victim)


def _least_valuable(sizes: Sizes, cost: CostModel, trial: Trial | None) -> _Bucket | None:
    """The bucket whose loss costs least for each byte that it frees (for each bucket, if nothing was measured)."""
    coda_cost = cost.coda if cost.coda is not None else CostModel.assumed(sizes.coda_ladder.max).core
    core = extra_seconds(sizes.ladder, cost.core), trial.core if trial else {}
    coda = extra_seconds(sizes.coda_ladder, coda_cost), trial.coda if trial else {}
    buckets = [
        _Bucket(program, rows, seconds / max(1, freed.get(rows, 1)))
        for program, (losses, freed) in (("core", core), ("coda", coda))
        for rows, seconds in losses.items()
    ]
    return min(buckets, key=lambda bucket: bucket.loss, default=None)


def _give_up(sizes: Sizes, victim: _Bucket) -> Sizes:
    logger.warning(
        "GPU memory is short: bucket %d of %s is given up, so its rows run at the next larger one; lower num_pages (or "
        "kv_cache_bytes) to keep it",
        victim.rows,
        victim.program,
    )
    if victim.program == "core":
        return replace(sizes, ladder=without(sizes.ladder, victim.rows))
    return replace(sizes, coda_ladder=without(sizes.coda_ladder, victim.rows))
