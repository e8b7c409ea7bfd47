"""``tessella-p2p init``: the client's configuration file and key, made once."""

from __future__ import annotations

import os

import click

from tessella_p2p.base.errors import ConfigurationError
from tessella_p2p.cli.client_file import default_client_file, read_client_file
from tessella_p2p.cli.main import EXIT_STATUS_HELP
from tessella_p2p.cli.options import ClientOptions
from tessella_p2p.cli.terminal import print_json
from tessella_p2p.node.config_file import new_file, toml_value
from tessella_p2p.node.keystore import load_or_generate_key


@click.command(epilog=EXIT_STATUS_HELP)
@click.option("--json", "as_json", is_flag=True, help="One JSON object: config, key, peer_id, written.")
@click.pass_context
def init(ctx: click.Context, as_json: bool) -> None:
    """Write the client's configuration file and its key.

    The file takes up -a and --model-id from before the subcommand, and lies where -c says. What is there already is left as it is.
    """
    options: ClientOptions = ctx.obj
    path = options.config_file or default_client_file(os.environ)
    key_path = path.with_name("client.key")
    is_new = not os.path.lexists(path)
    if not is_new:
        read_client_file(path, os.environ)  # it is kept, so it has to be one
    # Refused where others may write: then no file that may come to hold an API key is begun there either.
    key = load_or_generate_key(key_path)
    if is_new:
        try:
            new_file(path, _content(options))
        except OSError as error:
            raise ConfigurationError(f"{path}: the configuration cannot be written: {error.strerror}") from error
    if as_json:
        print_json({"config": str(path), "key": str(key_path), "peer_id": key.peer_id, "written": is_new})
        return
    click.echo(f"{path}: {'written' if is_new else 'there already, and left as it is'}")
    click.echo(f"{key_path}: {key.peer_id}")


def _content(options: ClientOptions) -> str:
    model = toml_value(options.model_id) if options.model_id else '"…"'
    return f"""\
# What `tessella-p2p chat`, `fim`, `status`, `peers` and `why` ask. A flag wins over the environment, the environment over this file.

# The node (-a, TESSELLA_API_URL).
api_url = {toml_value(options.api_url)}

# The model, where a node knows several (--model-id, TESSELLA_MODEL_ID).
{"" if options.model_id else "# "}model_id = {model}

# What the node's operator gave you, if it asks for keys (TESSELLA_API_KEY). Keep this file to yourself then.
# api_key = "tsl-…"
"""
