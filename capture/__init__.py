"""How it is run: static pools and buffers, graph backends, executor. Knows no requests."""
