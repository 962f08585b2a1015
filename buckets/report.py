"""A profile as one page of HTML that needs nothing else: no file beside it and no network."""

import html
import json
from collections.abc import Mapping
from importlib import resources
from string import Template
from typing import Any


def report_html(result: Mapping[str, Any], *, name: str, script: str, style: str, notice: str) -> str:
    """The page of a profile's result, as `wavegraph.study.profile.report` makes it, for the model called ``name``.

    ``script`` and ``style`` are those of uPlot, and ``notice`` its name and licence.
    """
    page = Template(resources.files(__package__).joinpath("report.html").read_text(encoding="utf-8"))
    words = f"{result['cpu']}, {result['threads']} threads, backend {result['backend']}, {result['dtype']}"
    return page.substitute(
        title=html.escape(f"Buckets of {name}"),
        subtitle=html.escape(words),
        notice=html.escape(notice),
        uplot_style=style,
        uplot_script=script,
        data=json.dumps(result).replace("<", "\\u003c"),  # no text of it can end the script element
    )
