"""Runs lm-eval's client on a small task of local files: python lm_eval_task.py URL MODEL TOKENIZER_FOLDER TASK_FOLDER.

Prints the log-likelihood of each choice as one line of JSON: [context, continuation, logprob, is_greedy].
A script of its own, since lm-eval and what it imports warn of much that is not ours.
"""

import json
import sys

from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager


def main(url: str, model: str, tokenizer: str, tasks: str) -> None:
    results = simple_evaluate(
        model="local-completions",
        model_args={
            "model": model,
            "base_url": url,
            "tokenizer": tokenizer,
            "tokenizer_backend": "huggingface",
            "num_concurrent": 4,
            "max_length": 512,
        },
        tasks=["wavegraph_local"],
        task_manager=TaskManager(include_path=tasks, include_defaults=False),
        bootstrap_iters=0,
        log_samples=True,
    )
    found = [
        [*arguments, *response]
        for sample in results["samples"]["wavegraph_local"]
        for arguments, response in zip(sample["arguments"], sample["filtered_resps"], strict=True)
    ]
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
