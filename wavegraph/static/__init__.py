"""Files that pages are made of, read from the package so that no page asks the network for anything.

``uPlot.iife.min.js`` and ``uPlot.min.css`` are those of uPlot 1.6.32 (npm package ``uplot``), unchanged, under the MIT
licence in ``uPlot.LICENSE``. A page that holds them holds `UPLOT_NOTICE` too.
"""

from importlib import resources

UPLOT_NOTICE = "uPlot 1.6.32, copyright (c) 2022 Leon Sorokin, MIT licence, https://github.com/leeoniya/uPlot"


def read_static(name: str) -> str:
    """The text of one file of this folder."""
    return resources.files(__name__).joinpath(name).read_text(encoding="utf-8")
