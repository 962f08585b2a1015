"""From measured buckets to a ladder: what each bucket costs on this machine, and which ones a workload should have.

The reader sees the measured milliseconds a replay, the ladder that is best for a chat workload under a budget of five
buckets, what it is predicted to save beside the default ladder, and an engine that runs with both.
"""

from pathlib import Path
from tempfile import TemporaryDirectory

from wavegraph import LLM, EngineConfig, SamplingParams
from wavegraph.buckets.ladder import Ladder
from wavegraph.buckets.samples import Samples
from wavegraph.builtin import builtin_path
from wavegraph.study.profile import Budget, Subject, recommend
from wavegraph.study.workload import chat

TOP = 64

subject = Subject.find(
    builtin_path(),
    EngineConfig(max_num_batched_tokens=TOP),
    contexts=(64,),
    candidates=(1, 2, 4, 8, 12, 16, 24, 32, 48, TOP),
)
with TemporaryDirectory() as folder:
    cost = subject.measure(Samples(Path(folder) / "samples.jsonl", subject.fingerprint())).cost()

print("rows   ms a replay")
for rows, seconds in zip(cost.core.rows, cost.core.seconds, strict=True):
    print(f"{rows:>4}   {seconds * 1e3:.2f}")

workload = chat(rate=4.0, requests=16).limited(256)
wanted = subject.schedule(workload, cost).rows
best = recommend(subject, wanted, cost, workload, Budget(max_graphs=5)).ladder
print(f"\n{len(wanted)} steps of {workload.name}:")
for name, ladder in (("default", Ladder.default(TOP)), ("five best", best)):
    found = subject.schedule(workload, cost, ladder)
    print(f"{name:>10}: {found.seconds:.2f} s predicted, {found.padding:.1%} padding, buckets {ladder.sizes}")

with LLM(builtin_path(), EngineConfig(buckets=best.sizes), cost=cost) as llm:
    (output,) = llm.generate("Return the ", SamplingParams(max_tokens=16))
    hits = llm.engine.stats().executor.core.hits
print(f"\nReturn the [{output.text}]\nreplays by bucket: {dict(sorted(hits.items()))}")
