"""Benchmarks of the engine on this machine. Ratios are of runs that were interleaved in one process."""
