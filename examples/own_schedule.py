"""A schedule of one's own, tried in the simulator: the real scheduler on virtual time, with no model and no torch.

Who goes first when both prompts and decodes have rows ready is a small class. The reader sees what a new one does to
the time to the first token and to the time between tokens, beside the policies that are there.
"""

from dataclasses import dataclass, replace

from wavegraph.buckets.cost import CostModel, ProgramCost
from wavegraph.buckets.ladder import Ladder
from wavegraph.scheduler.config import SchedulerConfig
from wavegraph.scheduler.lanes import LaneQueue
from wavegraph.scheduler.order import DecodeFirst, Fifo, Refill, StagePolicy
from wavegraph.scheduler.plan import Kind
from wavegraph.study.simulate import simulate
from wavegraph.study.workload import chat


@dataclass(frozen=True)
class Turns:
    """Whichever kind was passed over for more steps; prompts if neither was."""

    def first(self, prompts: LaneQueue, decodes: LaneQueue) -> Kind:
        """Choose for one step."""
        return Kind.PROMPT if prompts.waited >= decodes.waited else Kind.DECODE


POLICIES: list[StagePolicy] = [DecodeFirst(), Refill(), Fifo(), Turns()]
COST = CostModel(ProgramCost((1, 64), (0.004, 0.020), (0.0, 0.0), (0, 0)), host_seconds=0.0005, source="by hand")
LIMITS = SchedulerConfig(
    depths=4,
    page_size=16,
    num_pages=1024,
    max_model_len=1024,
    max_num_seqs=16,
    max_num_batched_tokens=64,
    prefill_chunk_size=None,
    packing="fill",
    fused=False,
)

workload = chat(rate=1.5, requests=32).limited(LIMITS.max_model_len)
print(f"{len(workload.requests)} requests, {workload.output_tokens} output tokens")
print(f"{'policy':>11} {'steps':>6} {'first token, s (p50, p99)':>28} {'between, ms (p50, p99)':>25} {'all, s':>8}")
for policy in POLICIES:
    result = simulate(workload, replace(LIMITS, stage_policy=policy), ladder=Ladder.default(64), cost=COST)
    ttft, itl = result.latencies.ttft, result.latencies.itl
    assert ttft is not None
    assert itl is not None
    seconds, gaps = f"{ttft.p50:.2f}, {ttft.p99:>5.2f}", f"{itl.p50 * 1e3:.0f}, {itl.p99 * 1e3:>3.0f}"
    print(f"{type(policy).__name__:>11} {result.steps:>6} {seconds:>28} {gaps:>25} {result.duration:>8.1f}")
