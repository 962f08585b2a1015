"""`benchmarks` and `tools` are no packages that are installed: they are imported from the checkout."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def make_importable() -> None:
    """Put the checkout behind everything else on the path."""
    if str(ROOT) not in sys.path:
        sys.path.append(str(ROOT))
