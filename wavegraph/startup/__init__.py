"""From options and a checkpoint to an engine that runs: backend, sizes, memory, bundles."""
