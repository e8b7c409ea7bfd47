"""``tessella-p2p orchestrator backup`` and ``restore``: copies of a ledger, made and put back."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path

import click

from tessella_p2p.base.clock import SystemClock
from tessella_p2p.base.errors import StorageError, TessellaError
from tessella_p2p.cli.main import EXIT_STATUS_HELP
from tessella_p2p.node.config import OrchestratorConfig

_FOLDER = click.Path(path_type=Path, file_okay=False)


@click.command(epilog=EXIT_STATUS_HELP)
@click.argument("target", type=_FOLDER)
@click.pass_obj
def backup(config: OrchestratorConfig, target: Path) -> None:
    """Copy the ledger to the new folder TARGET.

    The orchestrator may run meanwhile: the copy is the ledger of one moment. The key file is not in it; keep a copy of that too.
    """
    from tessella_p2p.ledger.backup import backup_ledger

    with _noted(config, "backup", {"target": str(target)}):
        backup_ledger(config.data_dir / "ledger", target)
    click.echo(f"the ledger is in {target}")


@click.command(epilog=EXIT_STATUS_HELP)
@click.argument("source", metavar="BACKUP", type=_FOLDER)
@click.pass_obj
def restore(config: OrchestratorConfig, source: Path) -> None:
    """Put the ledger of the folder BACKUP in the place of this one; the orchestrator must not run.

    What is there is moved aside, not deleted. What was settled after the backup is lost; the restored ledger begins a new chain, which
    federated orchestrators follow from its beginning.
    """
    from tessella_p2p.ledger.backup import restore_ledger
    from tessella_p2p.node.keystore import held_key, load_key

    load_key(config.keypair_path)  # a ledger without its identity is nobody's: no new key is made here
    path = config.data_dir / "ledger"
    with held_key(config.keypair_path), _noted(config, "restore", {"backup": str(source)}):
        stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S%fZ")
        restored, aside = (path.with_name(f"ledger.{word}-{stamp}") for word in ("restored", "before"))
        head = restore_ledger(source, restored, SystemClock().unix_ms())
        try:
            replaced = path.exists()
            if replaced:
                path.rename(aside)
            restored.rename(path)
        except OSError as error:
            raise StorageError(f"{restored} cannot take the place of {path}: {error.strerror}") from error
    click.echo(f"chain {head.chain} begins behind entry {head.sequence}; start the orchestrator")
    if replaced:
        click.echo(f"what was there is in {aside}", err=True)


@contextmanager
def _noted(config: OrchestratorConfig, kind: str, request: Mapping[str, object]) -> Iterator[None]:
    """Write what is done into the operator's log, beside the orchestrator's own lines."""
    from tessella_p2p.orchestrator.operator_log import FILE_NAME, OperatorLog

    where, clock = f"command, user {os.getuid()}", SystemClock()
    with closing(OperatorLog(config.data_dir / FILE_NAME)) as log:
        number = log.write(clock.unix_ms(), where, kind, request, "begun")
        try:
            yield
        except TessellaError as error:
            log.write(clock.unix_ms(), where, kind, request, error.code, reason=str(error), number=number)
            raise
        log.write(clock.unix_ms(), where, kind, request, "done", number=number)
