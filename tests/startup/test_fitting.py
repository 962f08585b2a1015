"""An engine's pool is what a GPU has left beside buffers and recordings; a short one costs buckets, each by name."""

from dataclasses import replace

import pytest
import torch

from tests.capture.driver import tiny_model
from tests.capture.fake_cuda import GRAPH_BYTES, TOTAL, FakeCuda, FakeDevice, fake_cuda
from wavegraph.buckets.cost import CostModel, ProgramCost
from wavegraph.buckets.ladder import Ladder
from wavegraph.buckets.shortage import extra_seconds, without
from wavegraph.capture.buffers import page_bytes
from wavegraph.capture.trial import Trial, run_trial
from wavegraph.config import EngineConfig
from wavegraph.errors import CaptureError, ConfigError
from wavegraph.model.io import StepIO
from wavegraph.model.ops.aten import AtenOps
from wavegraph.model.weights import Model
from wavegraph.startup.fitting import HEADROOM_BYTES, fit_to_gpu
from wavegraph.startup.sizing import Sizes, derive

__all__ = ["fake_cuda"]

CONFIG = EngineConfig(buckets=(1, 2, 4, 8), max_num_seqs=2, max_model_len=32, page_size=4)
GRAPHS = 4 + 3 * 2 + 1


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny_model()


def fit(model: Model, config: EngineConfig, cost: CostModel | None = None, memory: int = TOTAL) -> Sizes:
    sizes = derive(config, model.config, model.dtype, memory=memory)
    return fit_to_gpu(config, model, sizes, FakeDevice(), cost)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "wavegraph.startup.fitting"]


def room_for(model: Model, pages: int, graphs: int = GRAPHS) -> int:
    """Bytes with which ``pages`` and the scratch page fit exactly beside so many graphs. (Buffers are the host's.)"""
    pool = (pages + 1) * page_bytes(model.config, CONFIG.page_size, model.dtype)
    # The fake's memory knows of graphs alone, so the trial's own pool appears as memory that buffers do not take.
    trial_pool = 2 * page_bytes(model.config, CONFIG.page_size, model.dtype)
    return pool + graphs * GRAPH_BYTES - trial_pool + HEADROOM_BYTES


def test_a_trial_counts_recordings_and_gives_all_back(fake_cuda: FakeCuda, model: Model) -> None:
    limits = derive(CONFIG, model.config, model.dtype).limits
    trial = run_trial(model, limits, Ladder([1, 8]), Ladder([2]), FakeDevice())
    pool = 2 * page_bytes(model.config, CONFIG.page_size, model.dtype)
    assert trial == Trial(TOTAL, 6 * GRAPH_BYTES - pool, {1: GRAPH_BYTES, 8: GRAPH_BYTES}, {2: 3 * GRAPH_BYTES})
    assert fake_cuda.free == TOTAL
    assert not any(graph.ready for graph in fake_cuda.graphs)


def test_the_trial_has_a_pool_of_one_page(fake_cuda: FakeCuda, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    original = AtenOps.update_tables

    def update_tables(self: AtenOps, io: StepIO) -> None:
        seen.append(int(io.page_table.max()))
        original(self, io)

    limits = replace(derive(CONFIG, model.config, model.dtype).limits, num_pages=10**6)
    monkeypatch.setattr(AtenOps, "update_tables", update_tables)
    with pytest.raises(CaptureError, match="not permitted when stream is capturing"):
        run_trial(model, limits, Ladder([8]), Ladder([2]), FakeDevice())
    assert set(seen) == {1}
    assert fake_cuda.free == TOTAL


def test_a_pool_that_nobody_sized_takes_what_is_left(
    fake_cuda: FakeCuda, model: Model, caplog: pytest.LogCaptureFixture
) -> None:
    fake_cuda.free = room_for(model, 7)
    sizes = fit(model, CONFIG)
    assert sizes.limits.num_pages == sizes.scheduler.num_pages == 7
    assert (sizes.ladder.sizes, sizes.coda_ladder.sizes) == ((1, 2, 4, 8), (1, 2))
    fake_cuda.free -= 1
    assert fit(model, CONFIG).limits.num_pages == 6
    assert not warnings_of(caplog)


def test_but_no_more_than_all_requests_need(fake_cuda: FakeCuda, model: Model) -> None:
    assert fit(model, CONFIG).limits.num_pages == 2 * 32 // 4


def test_a_pool_that_was_asked_for_is_kept_at_the_price_of_buckets(
    fake_cuda: FakeCuda, model: Model, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a bucket of 1, one row runs at 2: that costs least; of CODA it frees three graphs at once."""
    config = replace(CONFIG, num_pages=7)
    fake_cuda.free = room_for(model, 7, GRAPHS - 2)
    sizes = fit(model, config)
    assert sizes.limits.num_pages == 7
    assert (sizes.ladder.sizes, sizes.coda_ladder.sizes) == ((2, 4, 8), (2,))
    assert [message.split(" is given up")[0] for message in warnings_of(caplog)] == [
        "GPU memory is short: bucket 1 of core",
        "GPU memory is short: bucket 1 of coda",
    ]


def test_what_a_bucket_is_worth_is_a_matter_of_the_cost_model(fake_cuda: FakeCuda, model: Model) -> None:
    """Here 1 and 2 rows cost next to nothing, and all from 4 on cost the same."""
    seconds = (1e-9, 2e-9, 8.0, 8.0)
    cost = CostModel(ProgramCost((1, 2, 4, 8), seconds, (0.0,) * 4, (0,) * 4), source="measured")
    fake_cuda.free = room_for(model, 7, GRAPHS - 1)
    assert fit(model, replace(CONFIG, num_pages=7), cost).ladder.sizes == (1, 2, 8)


def test_a_pool_that_fits_with_no_ladder_is_refused(fake_cuda: FakeCuda, model: Model) -> None:
    fake_cuda.free = room_for(model, 7, 5) - 1  # one graph for each of CORE, the CODAs and the tables
    with pytest.raises(ConfigError, match=r"num_pages: 7 pages of \d+ bytes do not fit into the GPU's \d+ free bytes"):
        fit(model, replace(CONFIG, num_pages=7))
    fake_cuda.free += 1
    sizes = fit(model, replace(CONFIG, num_pages=7))
    assert (sizes.ladder.sizes, sizes.coda_ladder.sizes) == ((8,), (2,))


def test_a_trial_that_finds_no_memory_is_repeated_with_fewer_buckets(
    fake_cuda: FakeCuda, model: Model, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    original = AtenOps.prepare

    def prepare(self: AtenOps, *arguments: object) -> None:
        if arguments[-1] == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        original(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(AtenOps, "prepare", prepare)
    assert fit(model, CONFIG).ladder.sizes == (2, 4, 8)
    assert len(warnings_of(caplog)) == 1
    assert fake_cuda.free == TOTAL


def test_other_failures_of_a_trial_are_no_matter_of_memory(
    fake_cuda: FakeCuda, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_cuda.fail["instantiate"] = RuntimeError("CUDA error: invalid argument")
    with pytest.raises(CaptureError, match=r"core\[8\]: .*invalid argument"):
        fit(model, CONFIG)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_pages": 10**6}, r"the KV pool would take \d+ bytes, but this GPU has 100000000; lower num_pages"),
        ({"max_num_seqs": 10**6}, "the tables of requests would take .* this GPU has"),
    ],
)
def test_what_a_gpu_cannot_hold_is_refused_before_it_is_loaded(
    model: Model, options: dict[str, int], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        derive(replace(CONFIG, **options), model.config, model.dtype, memory=10**8)  # type: ignore[arg-type]


def test_a_fraction_is_of_the_gpu(model: Model) -> None:
    bytes_per_page = page_bytes(model.config, 4, model.dtype)
    sizes = derive(replace(CONFIG, kv_cache_fraction=0.5), model.config, model.dtype, memory=20 * bytes_per_page)
    assert sizes.limits.num_pages == 10


def test_worth_is_what_the_next_bucket_costs_more() -> None:
    cost = CostModel.assumed(8).core
    worth = extra_seconds(Ladder([1, 2, 4, 8]), cost)
    assert worth == {1: 1 / 8, 2: 1 * 2 / 8, 4: 2 * 4 / 8}
    assert without(Ladder([1, 2, 4]), 2) == Ladder([1, 4])
    assert extra_seconds(Ladder([3]), cost) == {}
