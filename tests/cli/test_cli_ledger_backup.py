"""`orchestrator backup` and `restore`: what is done, what is refused, and the line that each leaves."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tessella_p2p.cli.main import cli
from tessella_p2p.ledger.store import LedgerStore
from tessella_p2p.node.keystore import generate_key, held_key
from tests.ledger.proving import NOW, key_of

PEER = key_of("peer").peer_id


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """An orchestrator's folder with a key and a ledger of one entry."""
    generate_key(tmp_path / "orchestrator.key")
    _slash(tmp_path, 1)
    return tmp_path


def _slash(home: Path, amount: int) -> None:
    with closing(LedgerStore(home / "data" / "ledger", 1 << 24, sync=False)) as store:
        store.slash(PEER, amount, "a reason", "operator", NOW)


def _balance(home: Path) -> tuple[int, bool]:
    """The balance of the peer, and whether the chain is another than the first."""
    with closing(LedgerStore(home / "data" / "ledger", 1 << 24, sync=False)) as store:
        return store.account(PEER).micro_credits, store.head().chain > 0


def _arguments(home: Path, *arguments: str) -> list[str]:
    settings = ["--keypair-path", str(home / "orchestrator.key"), "--data-dir", str(home / "data")]
    return ["orchestrator", *settings, *arguments]


def _run(home: Path, *arguments: str) -> Result:
    return CliRunner().invoke(cli, _arguments(home, *arguments))


def _noted(home: Path) -> list[tuple[str, str]]:
    lines = (home / "data" / "operator.log").read_text(encoding="ascii").splitlines()
    return [(line["kind"], line["outcome"]) for line in map(json.loads, lines)]


def test_a_backup_is_put_back_as_the_next_chain_and_what_was_there_is_kept(home: Path) -> None:
    copied = _run(home, "backup", str(home / "copy"))
    assert copied.exit_code == 0, copied.output
    _slash(home, 10)
    assert _balance(home) == (-11, False)
    restored = _run(home, "restore", str(home / "copy"))
    assert restored.exit_code == 0, restored.output
    assert _balance(home) == (-1, True)
    (aside,) = (home / "data").glob("ledger.before-*")
    assert str(aside) in restored.stderr
    assert _noted(home) == [("backup", "begun"), ("backup", "done"), ("restore", "begun"), ("restore", "done")]


def test_a_backup_is_made_while_the_orchestrator_runs(home: Path) -> None:
    with closing(LedgerStore(home / "data" / "ledger", 1 << 24, sync=False)) as store:
        store.slash(PEER, 5, "meanwhile", "operator", NOW)
        # In a process of its own: one process opens a database once.
        command = [sys.executable, "-m", "tessella_p2p", *_arguments(home, "backup", str(home / "copy"))]
        assert subprocess.run(command, check=False, capture_output=True).returncode == 0
        store.slash(PEER, 50, "later", "operator", NOW)
    assert _run(home, "restore", str(home / "copy")).exit_code == 0
    assert _balance(home) == (-6, True)


def test_nothing_is_put_back_under_a_running_orchestrator(home: Path) -> None:
    assert _run(home, "backup", str(home / "copy")).exit_code == 0
    with held_key(home / "orchestrator.key"):
        refused = _run(home, "restore", str(home / "copy"))
    assert refused.exit_code == 2
    assert "another process of this machine is" in refused.stderr
    assert _balance(home) == (-1, False)


@pytest.mark.parametrize("command", ["backup", "restore"])
def test_what_is_refused_leaves_everything_as_it_was_and_says_why(home: Path, command: str) -> None:
    (home / "full").mkdir()
    target = home / "full" if command == "backup" else home / "nowhere"
    refused = _run(home, command, str(target))
    assert refused.exit_code == 1
    assert str(target) in refused.stderr
    assert _balance(home) == (-1, False)
    assert sorted(path.name for path in (home / "data").iterdir()) == ["ledger", "operator.log"]
    assert _noted(home) == [(command, "begun"), (command, "storage_error")]


def test_no_identity_is_made_up_for_a_restored_ledger(home: Path) -> None:
    assert _run(home, "backup", str(home / "copy")).exit_code == 0
    (home / "orchestrator.key").unlink()
    refused = _run(home, "restore", str(home / "copy"))
    assert refused.exit_code == 2
    assert "there is no key file" in refused.stderr
    assert not (home / "orchestrator.key").exists()
