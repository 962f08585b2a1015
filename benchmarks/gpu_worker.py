"""Runs figures of `gpu_check.py` one after the other in one process, and prints a line of JSON for each."""

import gc
import json
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from benchmarks.gpu_bench import Bench, gpu_bench
from benchmarks.gpu_sections import SECTIONS

Sections = Mapping[str, Callable[[Bench], dict[str, Any]]]

# What sections are known to raise; anything else ends the process, and its parent starts the next one.
_ERRORS = (ArithmeticError, AssertionError, AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError)


def run(names: Sequence[str], bench: Bench, sections: Sections = SECTIONS) -> None:
    """Print ``{"name", "ok", "seconds", "result" or "error"}`` of each; stop behind one that broke the device."""
    for name in names:
        started = time.monotonic()
        entry: dict[str, Any] = {"name": name}
        try:
            entry |= {"ok": True, "result": sections[name](bench)}
        except _ERRORS as error:
            reason = f"{type(error).__name__}: {error}".split("\n")[0]
            entry |= {"ok": False, "error": reason, "output": traceback.format_exc()[-4000:]}
        gc.collect()
        broken = _is_broken(bench)
        print(json.dumps(entry | {"seconds": time.monotonic() - started, "broken": broken}), flush=True)
        if broken:
            return


def _is_broken(bench: Bench) -> bool:
    """Whether the device can do nothing any more; else memory that the section let go of is given back."""
    try:
        bench.device.synchronize()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    except RuntimeError:
        return True
    return False


if __name__ == "__main__":
    run(sys.argv[1].split(","), gpu_bench())
