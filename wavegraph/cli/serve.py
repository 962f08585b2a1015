"""``wavegraph serve``: an OpenAI-compatible server."""

from pathlib import Path
from typing import Any

import click

from wavegraph.cli.common import complete_model, examples
from wavegraph.cli.engine import engine_options, import_engine, model_path, take_options


@click.command(
    "serve",
    epilog=examples(
        "serve builtin",
        "serve ByteDance/Ouro-1.4B --host 0.0.0.0 --api-key KEY",
        "serve ./checkpoint --bundle ./bundle --log-format json",
    ),
)
@click.argument("model", shell_complete=complete_model)
@click.option("--host", default="127.0.0.1", show_default=True, metavar="HOST", help="Address to listen on.")
@click.option("--port", default=8000, show_default=True, type=click.IntRange(0, 65535), help="0: any free one.")
@click.option("--served-model-name", "name", metavar="NAME", help="What clients call the model.  [default: MODEL]")
@click.option(
    "--api-key",
    "api_keys",
    multiple=True,
    envvar="WAVEGRAPH_API_KEY",
    metavar="KEY",
    help="Needed for /v1*. Several can be given. Or set WAVEGRAPH_API_KEY, which no process list shows.",
)
@click.option(
    "--allow-origin",
    "allow_origins",
    multiple=True,
    metavar="ORIGIN",
    help="Web origin that browsers may call from; '*' for any. Several can be given.",
)
@click.option("--max-pending", type=int, metavar="N", help="Most outputs waiting or running.  [default: 1024]")
@click.option("--max-body-bytes", type=int, metavar="N", help="Longest request body.  [default: 4 MiB]")
@click.option("--receive-timeout", type=float, metavar="S", help="For a request to arrive.  [default: 30]")
@click.option("--request-timeout", type=float, metavar="S", help="For a request to be answered.  [default: 600]")
@click.option("--stall-timeout", type=float, metavar="S", help="For a client that does not read.  [default: 30]")
@click.option("--keep-alive", type=float, metavar="S", help="Between signs of life in a stream.  [default: 15]")
@click.option("--dashboard/--no-dashboard", default=True, show_default=True, help="Live page at /dashboard, no key.")
@click.option(
    "--drain-seconds",
    default=60.0,
    show_default=True,
    type=click.FloatRange(0),
    metavar="S",
    help="After SIGTERM, for what runs to end.",
)
@click.option("--log-format", default="text", show_default=True, type=click.Choice(["text", "json"]))
@click.option("--log-level", default="info", show_default=True, type=click.Choice(["info", "warning", "error"]))
@engine_options()
def serve_command(
    model: str,
    host: str,
    port: int,
    name: str | None,
    drain_seconds: float,
    log_format: str,
    log_level: str,
    **given: Any,
) -> None:
    """Serve MODEL over HTTP, to OpenAI's clients: a checkpoint folder, a Hugging Face Hub id, or 'builtin'.

    Listens at once; /ready says when the model is there. SIGTERM lets what runs end, and refuses the rest.
    """
    chosen = {field: given.pop(field) for field in _SETTINGS}
    options = take_options(given)
    import_engine()
    from functools import partial

    from wavegraph.server.logs import set_up_logging
    from wavegraph.server.serve import bind, serve
    from wavegraph.server.settings import Settings
    from wavegraph.startup.build import build_engine

    settings = Settings(
        model_name=name if name is not None else _name_of(model),
        **{field: value for field, value in chosen.items() if value not in (None, ())},
    )
    set_up_logging(log_format, log_level)
    with bind(host, port, settings) as listener:
        build = partial(build_engine, model_path(model), options.config, **options.arguments)
        code = serve(build, settings, listener, drain_seconds=drain_seconds)
    click.get_current_context().exit(code)


_SETTINGS = (
    "api_keys",
    "allow_origins",
    "max_pending",
    "max_body_bytes",
    "receive_timeout",
    "request_timeout",
    "stall_timeout",
    "keep_alive",
    "dashboard",
)


def _name_of(model: str) -> str:
    """A folder's own name; where it lies is nobody's business."""
    return Path(model).resolve().name if Path(model).is_dir() else model
