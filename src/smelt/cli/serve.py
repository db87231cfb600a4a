"""`smelt serve`: an OpenAI-compatible server of one model."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from smelt.cli.config_flags import flags_given, with_config_flags
from smelt.cli.output import ModelArgument, check_device, say
from smelt.config import parse
from smelt.errors import SmeltError, install_command
from smelt.serve.server.settings import ServeConfig
from smelt.strict_yaml import read_yaml

ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", help="YAML with these options as keys; flags given here win."),
]


@with_config_flags(ServeConfig)
def run(context: typer.Context, model: ModelArgument, config: ConfigOption = None, **flags: Any) -> None:
    try:
        from smelt.serve.server.server import serve
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("smelt"):
            raise
        raise SmeltError(f"the server needs {error.name}; `{install_command('serve')}`.") from error
    options = read_serve_config(config, flags_given(context, flags))
    settings = options.resolve(model)
    if options.replicas > 1 or options.ray_address:
        from smelt.serve.cluster.placement import resolve_placement
        from smelt.serve.cluster.supervisor import supervise_replicas

        placement = resolve_placement(options)
        say(f"loading {model}")
        code = serve(settings, partial(supervise_replicas, placement))
    else:
        say(f"loading {model}")
        code = serve(settings)
    if code:
        raise typer.Exit(code)


def read_serve_config(path: Path | None, flags: dict[str, Any]) -> ServeConfig:
    """Merge a configuration file and the flags on the command line, which win."""
    content: dict[str, Any] = {}
    if path is not None:
        read = read_yaml(path, "server configuration")
        content = {} if read is None else read  # None: an empty file
        parse(ServeConfig, content, str(path))  # errors in the file name the file
    config = parse(ServeConfig, {**content, **flags}, "the command line")
    check_device(config.device)
    return config
