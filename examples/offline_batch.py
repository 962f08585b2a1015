"""Many prompts at once: what the built-in model makes of each, and how the wavefront filled the steps.

The same batch runs twice, ordinary and as a wavefront. The reader sees equal tokens, and fewer, fuller steps.
"""

from wavegraph import LLM, EngineConfig, RequestOutput, SamplingParams
from wavegraph.builtin import builtin_path

PROMPTS = [
    "def __init__(self, ",
    "Return the ",
    "The following example shows how to open a file and to read it line by line:\n\n    with open(",
    "class Handler(socketserver.BaseRequestHandler):\n    def handle(self):\n        ",
]


def run(wavefront: bool) -> list[RequestOutput]:
    """All prompts on a new engine; prints what its steps looked like."""
    config = EngineConfig(wavefront=wavefront, prefill_chunk_size=16, max_num_batched_tokens=64)
    with LLM(builtin_path(), config) as llm:
        outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=24))
        steps = llm.engine.stats().scheduler
    padding = steps.padding_rows / (steps.rows + steps.padding_rows)
    name = "wavefront" if wavefront else "ordinary"
    print(f"{name:>10}: {steps.steps} steps of {steps.rows / steps.steps:.1f} rows, {padding:.0%} padding")
    return outputs


ordinary, wave = run(False), run(True)
same = [output.token_ids for output in ordinary] == [output.token_ids for output in wave]
print(f"    tokens: {'equal' if same else 'DIFFERENT'}\n")

for output in wave:
    print(f"{output.prompt}[{output.text}]  ({len(output.token_ids)} tokens, {output.finish_reason})\n")
