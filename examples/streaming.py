"""Token by token, with early exit: each piece of text as it comes, and after how many of its four loops it left.

The reader sees a mark for each loop beside the text: the gate lets some tokens leave early, and has others take all.
"""

from wavegraph import LLM, SamplingParams
from wavegraph.builtin import builtin_path

params = SamplingParams(max_tokens=32, exit_threshold=0.45, exit_kv="copy")

with LLM(builtin_path()) as llm, llm.stream("for index in range(", params) as stream:
    shown = ""
    for output in stream:
        text = output.text or ""
        print(f"{'#' * (output.exit_depths[-1] + 1):<4}  {text[len(shown) :]!r}", flush=True)
        shown = text

print(f"\n{output.prompt}{output.text}\n")
print(f"{len(output.token_ids)} tokens, {output.mean_loops:.2f} loops each on average; ", end="")
first, total = output.metrics.time_to_first_token or 0.0, output.metrics.latency or 0.0
print(f"the first after {first * 1e3:.0f} ms, all after {total * 1e3:.0f} ms")
