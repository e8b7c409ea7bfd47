"""``operate`` against a real orchestrator's HTTP API on loopback."""

from __future__ import annotations

import json
import socket
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
import trio
from click.testing import CliRunner, Result

from tessella_p2p.base.errors import ConfigurationError
from tessella_p2p.bridge.orchestrator_json import base64url
from tessella_p2p.cli.main import cli
from tessella_p2p.cli.node_client import NodeClient
from tessella_p2p.cli.tui.node import AsyncNode
from tessella_p2p.ledger.audit_evidence import AuditEvidence
from tessella_p2p.ledger.changes import VerdictReached
from tests.bridge.bridge_doubles import serving
from tests.bridge.orchestrator_world import CONTRACT, LAYERS, MODEL_ID, RECIPE, TOKEN, key_of, world

PEER = key_of("peer").peer_id


async def invoke(url: str, *arguments: str, token: str | None = TOKEN, stdin: str | None = None) -> Result:
    """The command, on a thread of its own beside the server."""
    runner = CliRunner(env={"TESSELLA_ADMIN_TOKEN": token})
    run = partial(runner.invoke, cli, ["operate", "--url", url, *arguments], input=stdin)
    return await trio.to_thread.run_sync(run)


async def test_the_books_are_read_and_an_identity_is_slashed(tmp_path: Path) -> None:
    async with world(tmp_path / "ledger") as made, serving(made.app) as url:
        slashed = await invoke(url, "slash", PEER, "--credits", "2.5", "--reason", "it lied", "--blacklist")
        assert slashed.exit_code == 0, slashed.output
        assert made.store.account(PEER).micro_credits == -2_500_000
        assert made.store.is_blacklisted(PEER)
        ledger = json.loads((await invoke(url, "ledger", "--limit", "1")).stdout)
        assert [line["kind"] for line in ledger["entries"]] == ["blacklist_changed"]
        assert PEER in (await invoke(url, "credits", PEER)).stdout
        assert PEER in (await invoke(url, "credits")).stdout
        assert PEER in (await invoke(url, "reputation")).stdout
        assert (await invoke(url, "slash", PEER, "--reason", "a mistake", "--pardon")).exit_code == 0
        assert not made.store.is_blacklisted(PEER)


async def test_what_a_verdict_rests_on_is_shown_as_it_was_sealed(tmp_path: Path) -> None:
    async with world(tmp_path / "ledger") as made, serving(made.app) as url:
        reached = VerdictReached(audit_id=bytes(16), peer=PEER, verdict="failed", reason="wrong")
        made.store.record_verdict(reached, 1, None, AuditEvidence(b"p" * 40, (b"r" * 40,)))
        shown = json.loads((await invoke(url, "evidence", "1")).stdout)
        assert shown == {"sequence": 1, "proof": base64url(b"p" * 40), "reports": [base64url(b"r" * 40)]}
        assert (await invoke(url, "evidence", "2")).exit_code == 1


async def test_a_mesh_is_rebalanced_and_a_manifest_published(tmp_path: Path) -> None:
    terms = {"recipe": RECIPE, "device": "*", "layer_mb": 1, "kv_mb": 1, "embedding_mb": 1, "head_mb": 1}
    manifest = {
        "model_id": MODEL_ID,
        "manifest_root": bytes(32).hex(),
        "contract_hash": CONTRACT.hex(),
        "total_layers": LAYERS,
        "terms": [terms],
    }
    async with world(tmp_path / "ledger") as made, serving(made.app) as url:
        plan = await invoke(url, "rebalance", "--dry-run", "--model-id", MODEL_ID)
        assert json.loads(plan.stdout)["moves"] == []
        published = await invoke(url, "publish", "-", stdin=json.dumps(manifest))
        assert published.exit_code == 0, published.output
        assert made.orchestrator.catalogue.by_name(MODEL_ID).manifest_root == bytes(32)
        for wrong in ("[]", "{", "\xff"):
            assert (await invoke(url, "publish", "-", stdin=wrong)).exit_code == 2


async def test_a_wrong_token_is_the_orchestrators_refusal(tmp_path: Path) -> None:
    async with world(tmp_path / "ledger") as made, serving(made.app) as url:
        refused = await invoke(url, "ledger", token="another token than that")
        assert refused.exit_code == 1
        assert "not the admin token" in refused.stderr


async def test_the_token_comes_out_of_a_file_that_nobody_else_reads(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(f"{TOKEN}\n", encoding="ascii")
    async with world(tmp_path / "ledger") as made, serving(made.app) as url:
        path.chmod(0o644)
        assert "chmod 600" in (await invoke(url, "--admin-token-file", str(path), "ledger", token=None)).stderr
        path.chmod(0o600)
        assert (await invoke(url, "--admin-token-file", str(path), "ledger", token=None)).exit_code == 0
        missing = await invoke(url, "ledger", token=None)
        assert (missing.exit_code, TOKEN in missing.output) == (2, False)
        assert "no admin token" in missing.stderr


async def test_a_token_for_this_machine_goes_to_no_proxy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))  # nobody listens there
        monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{taken.getsockname()[1]}")
        for name in ("NO_PROXY", "no_proxy"):
            monkeypatch.delenv(name, raising=False)
        async with world(tmp_path / "ledger") as made, serving(made.app) as url:

            def ask() -> object:
                with NodeClient(url, bearer=TOKEN) as client:
                    return client.get("/workers")

            assert await trio.to_thread.run_sync(ask) is not None
            node = AsyncNode(url, TOKEN)
            assert await node.get("/workers") is not None
            await node.aclose()


@pytest.mark.parametrize("url", ["http://203.0.113.7:9091", "http://orchestrator.example:9091"])
def test_a_token_crosses_no_network_unencrypted(url: str) -> None:
    with pytest.raises(ConfigurationError, match="not sent unencrypted") as refused:
        NodeClient(url, bearer=TOKEN)
    assert TOKEN not in str(refused.value)


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:9091", "http://[::1]:9091", "http://localhost:9091", "https://x.example"]
)
def test_a_token_goes_to_this_machine_or_over_https(url: str) -> None:
    with NodeClient(url, bearer=TOKEN):
        pass
