"""One request, two engines: it leaves the first in the middle of its prompt, as bytes, and goes on in the second.

This is what separating prefill from decode needs, all but the transport. The reader sees how far the request was at
each depth when it left, how large it is on the way, and that its tokens are those of a request that never moved.
"""

from wavegraph import LLM, EngineConfig, SamplingParams
from wavegraph.builtin import builtin_path
from wavegraph.engine.handover import RequestState

PROMPT = "The following example shows how to open a file and to read it line by line:\n\n    with open("
CONFIG = EngineConfig(prefill_chunk_size=8, max_num_batched_tokens=16)

params = SamplingParams(max_tokens=24, temperature=0.5, seed=7)

with LLM(builtin_path(), CONFIG) as one, LLM(builtin_path(), CONFIG) as other:
    (unmoved,) = other.generate(PROMPT, params)

    one.engine.add_request("traveller", PROMPT, params)
    for _ in range(3):
        one.engine.step()
    data = one.engine.export_request("traveller").to_bytes()

    state = RequestState.from_bytes(data)
    prompt, frontier = state.snapshot.spec.prompt_token_ids, state.snapshot.frontier
    print(f"{len(prompt)} prompt tokens, of which the first engine has done, by depth: {frontier}")
    print(f"{len(data):,} bytes on the way; requests left in the first engine: {one.engine.stats().running}")

    other.engine.import_request(state)
    while other.engine.has_unfinished:
        for output in other.engine.step():
            moved = output  # all so far, so the last one is the whole

print(f"\n{moved.prompt}[{moved.text}]\n")
verdict = "equal to" if moved.token_ids == unmoved.token_ids else "DIFFERENT from"
print(f"{len(moved.token_ids)} sampled tokens, {verdict} those of a request that stayed")
