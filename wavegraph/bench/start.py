"""How long a fresh process takes to its first token: with an empty cache, with a build in the cache, with a bundle."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

from wavegraph.errors import EngineError
from wavegraph.startup.precompile import precompile
from wavegraph.study.measure import Times, machine_facts

CASES = ("empty cache", "build in cache", "bundle")

_CHILD = """
import json, sys
from wavegraph.config import EngineConfig
from wavegraph.llm import LLM
from wavegraph.sampling import SamplingParams
model, dtype, bundle = sys.argv[1:4]
with LLM(model, EngineConfig(max_num_seqs=4), dtype=dtype, bundle=bundle or None) as llm:
    token = llm.generate([1, 2, 3], SamplingParams(max_tokens=1, ignore_eos=True))[0].token_ids[0]
    from wavegraph.model.ops.build import compiler_runs
    print(json.dumps({"token": token, "compiler_runs": len(compiler_runs()), "ops": llm.engine.model.ops.name}))
"""


def bench_start(model: str | Path, dtype: str, repeats: int) -> dict[str, Any]:
    """Milliseconds from starting a process to its first token, and the compiler processes it started.

    An empty cache is filled once, whatever ``repeats``. Raises `EngineError` if a process fails.
    """
    table = []
    with tempfile.TemporaryDirectory() as folder:
        bundle = Path(folder, "bundle")
        precompile(model, bundle, dtype=dtype)
        environment = {**os.environ, "WAVEGRAPH_CACHE": str(Path(folder, "cache"))}
        for case in CASES:
            cold = case == CASES[0]
            used = bundle if case == "bundle" else None
            runs = [_start(model, dtype, used, environment) for _ in range(1 if cold else repeats + 1)]
            runs = runs if cold else runs[1:]  # what is on disk is in memory then
            (facts,) = {json.dumps(facts) for _, facts in runs}
            times = Times.of([milliseconds for milliseconds, _ in runs])
            table.append({"case": case, "first_token_ms": times.to_dict(), **json.loads(facts)})
    return {**machine_facts(), "benchmark": "start", "model": str(model), "dtype": dtype, "starts": table}


def _start(
    model: str | Path, dtype: str, bundle: Path | None, environment: dict[str, str]
) -> tuple[float, dict[str, Any]]:
    command = [sys.executable, "-P", "-c", _CHILD, str(model), dtype, str(bundle or "")]
    started = perf_counter()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    milliseconds = (perf_counter() - started) * 1e3
    if done.returncode:
        raise EngineError(f"a process that starts {model} failed: {done.stderr.strip()[-500:]}")
    facts: dict[str, Any] = json.loads(done.stdout)
    return milliseconds, facts
