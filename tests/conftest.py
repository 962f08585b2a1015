"""Settings for all tests. Imports no room of the project: scheduler tests must run without torch."""

import os
from pathlib import Path

from hypothesis import settings

# Tests run side by side, a process a core. Set before anything imports torch; child processes inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Keep out of the user's cache folder, yet share what is made (by content) between processes and runs.
os.environ.setdefault("WAVEGRAPH_CACHE", str(Path(__file__).parents[1] / "build" / "cache"))

# The same examples in every run, on every machine.
settings.register_profile("wavegraph", derandomize=True, deadline=None)
settings.load_profile("wavegraph")
