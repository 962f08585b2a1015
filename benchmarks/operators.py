"""Where a replay of CORE spends its time, by operator: a table for each row count, then one line of JSON.

    python benchmarks/operators.py [ROWS ...]

Self CPU time by torch's profiler, a mean of 20 replays of the shape that `wavegraph bench replay` has.
"""

import json
import sys

from torch.profiler import ProfilerActivity, profile

from wavegraph.bench import replay
from wavegraph.bench.shape import Shape
from wavegraph.startup.backend_choice import make_runner
from wavegraph.study.measure import machine_facts

REPLAYS = 20


def main(rows: list[int]) -> None:
    """Profile replays at each of ``rows``."""
    shape = Shape()
    executor, _ = replay._executor(shape, rows, make_runner("auto", shape.torch_dtype))
    executor.capture()
    tables = {}
    for count in rows:
        replay._set_rows(executor, shape, count)
        executor.core.replay(count, count)
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            for _ in range(REPLAYS):
                executor.core.replay(count, count)
        times = {event.key: event.self_cpu_time_total / REPLAYS / 1e3 for event in profiler.key_averages()}
        total = sum(times.values())
        print(f"{count} rows: {total:.2f} ms")
        for name, ms in sorted(times.items(), key=lambda item: -item[1])[:8]:
            print(f"  {name:36} {ms:8.3f} ms {ms / total:6.1%}")
        tables[count] = times
    executor.close()
    print(json.dumps({**machine_facts(), "benchmark": "operators", "ms": tables}))


if __name__ == "__main__":
    main([int(argument) for argument in sys.argv[1:]] or [16, 64, 256])
