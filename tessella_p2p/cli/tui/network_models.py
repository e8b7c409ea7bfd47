"""What a mesh serves, as JSON: run as a process of its own, since the terminal UI's event loop is another one than the network's.

``python -m tessella_p2p.cli.tui.network_models /ip4/HOST/tcp/PORT/p2p/PEER_ID``
"""

from __future__ import annotations

import sys
from dataclasses import asdict

import click
import trio

from tessella_p2p.base.errors import TessellaError
from tessella_p2p.cli.terminal import print_json
from tessella_p2p.node.log import configure_logging
from tessella_p2p.node.peer_address import parse_peer_address
from tessella_p2p.node.served_models import read_network_models


def main(address: str) -> None:
    """Print the models, those with the most workers first; exit status 1 and a line on standard error where it cannot."""
    configure_logging("error", "json")
    try:
        models = trio.run(read_network_models, parse_peer_address(address))
    except* TessellaError as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        click.echo(f"error: {error}", err=True)
        sys.exit(1)
    print_json([asdict(model) for model in models])


if __name__ == "__main__":
    main(sys.argv[1])
