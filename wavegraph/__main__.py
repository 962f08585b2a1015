"""``python -m wavegraph`` is ``wavegraph``."""

from wavegraph.cli import main

if __name__ == "__main__":
    main(prog_name="wavegraph")
