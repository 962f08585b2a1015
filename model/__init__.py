"""What is computed: config, checkpoint, PRELUDE/CORE/CODA over static tensors. No graphs, no requests."""
