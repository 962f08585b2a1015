"""The short table at the end of `gpu_check.py`."""

from collections.abc import Callable, Mapping
from typing import Any


def table_of(report: Mapping[str, Any]) -> str:
    """A line or a few for each section: what it measured, or why it failed; then the time of all."""
    lines = []
    for name, entry in report["sections"].items():
        if entry["ok"]:
            lines += [f"{name:<10} {text}" for text in _LINES[name](entry["result"])]
        else:
            lines.append(f"{name:<10} FAILED: {entry['error'].splitlines()[0][:200]}")
    lines.append(f"{'all':<10} {report['seconds']:.0f} s")
    return "\n".join(lines)


def _tests(result: Any) -> list[str]:
    return [f"{result['tests'] - result['skipped']} passed, {result['skipped']} skipped"]


def _machine(result: Any) -> list[str]:
    rates = f"read {result['read_gbs']:.0f} GB/s, copy {result['copy_gbs']:.0f} GB/s"
    return [f"{result.get('gpu', 'no GPU')}: {rates}, matrix {result['matrix_tflops']:.0f} TFLOP/s"]


def _capture(result: Any) -> list[str]:
    host = ", ".join(f"{us:.1f} us at {rows}" for rows, us in result["replay_host_us"].items())
    ladder = (
        f"{len(result['buckets'])} buckets of CORE {result['core_seconds']:.2f} s, {result['core_bytes'] >> 20} MiB"
    )
    return [f"{ladder}; all {result['seconds']:.2f} s, {result['bytes'] >> 20} MiB; host of a replay {host}"]


def _core(result: Any) -> list[str]:
    lines = []
    for rows, row in result["rows"].items():
        times = f"{row['ms']['median']:.3f} ms, {row['ratio_to_floor']:.2f} x weight read"
        lines.append(f"{rows:>5} rows: {times}, {row['tflops']:.0f} TFLOP/s ({row['of_matrix_rate']:.0%})")
    for rows, kernels in result["kernels"].items():
        if kernels:
            lines.append(f"{rows:>5} rows: kernels {kernels['busy_us']:.0f} us, gaps {kernels['gaps_us']:.0f} us")
    return lines


def _attention(result: Any) -> list[str]:
    return [
        f"{context:>5}: "
        + ", ".join(f"{name} {row['us_a_layer']:.1f} us ({row['gbs']:.0f} GB/s)" for name, row in kinds.items())
        for context, kinds in result["contexts"].items()
    ]


def _wavefront(result: Any) -> list[str]:
    return [
        f"chunk {chunk:>3}: ordinary {row['ordinary']['seconds']:.2f} s in {row['ordinary']['steps']} steps, wavefront "
        f"{row['wavefront']['seconds']:.2f} s in {row['wavefront']['steps']}, {row['ratio']:.2f} x"
        for chunk, row in result["chunks"].items()
    ]


def _decode(result: Any) -> list[str]:
    return [
        f"{requests:>3} requests: {row['graphs']['tokens_per_second']:.0f} tokens/s, {row['ratio']:.2f} x eager, "
        + ("same tokens" if row["same_tokens"] else "OTHER TOKENS")
        for requests, row in result["requests"].items()
    ]


def _start(result: Any) -> list[str]:
    seconds = f"{result['beyond_weights_seconds']:.2f} s beyond weights (trial {result['trial_seconds']:.2f} s"
    compilers = ", ".join(result["compilers"]) or "none"
    return [
        f"{seconds}, capture {result['capture_seconds']:.2f} s), {result['kernels']} kernels, compilers: {compilers}"
    ]


_LINES: Mapping[str, Callable[[Any], list[str]]] = {
    "tests": _tests,
    "machine": _machine,
    "capture": _capture,
    "core": _core,
    "attention": _attention,
    "wavefront": _wavefront,
    "decode": _decode,
    "start": _start,
}
