"""What would be, and what is: workloads, the simulator, the profiler of buckets, and what measuring has in common."""
