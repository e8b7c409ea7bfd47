"""Orchestrators that follow each other's ledgers, over the in-memory network in virtual time."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import ExitStack, asynccontextmanager, closing
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import pytest
import trio
from structlog.testing import capture_logs

from tessella_p2p.base.errors import NotAuthorized
from tessella_p2p.base.ids import LayerRange, PeerId
from tessella_p2p.base.limits import FEDERATION_PULL_S, MICRO_PER_CREDIT
from tessella_p2p.ledger.backup import restore_ledger
from tessella_p2p.ledger.blocking import in_place
from tessella_p2p.ledger.chain import Head
from tessella_p2p.ledger.client import OrchestratorClient
from tessella_p2p.ledger.evidence import SettlementTerms
from tessella_p2p.ledger.federation import decode_evidence
from tessella_p2p.ledger.mirrors import Mirrors
from tessella_p2p.ledger.store import LedgerStore
from tessella_p2p.net.framing import receive_message, send_message
from tessella_p2p.net.memory import MemoryFabric, MemoryNetwork, constant_latency
from tessella_p2p.net.network import Stream
from tessella_p2p.net.virtual_clock import VirtualClock, run_deterministic
from tessella_p2p.orchestrator.service import Orchestrator
from tessella_p2p.wire import messages as m
from tessella_p2p.wire import protocols
from tessella_p2p.wire.envelope import ClockSequencer, open_envelope, seal
from tessella_p2p.wire.keys import NodeKey
from tests.ledger.paper_issuer import PaperIssuer, proof_of
from tests.ledger.proving import LAYERS, NOW, ROOT, WORKERS, credits_for
from tests.orchestrator.paper_workers import MODEL, MODEL_ID, RECIPE, key_of

MIDDLE = WORKERS[1].peer_id
EARNED = credits_for(LayerRange(10, 20), 300)
"""What `proof_of` brings the middle worker: 3 credits."""
KEYS = {name: key_of(f"orchestrator {name}") for name in "ABC"}
ADDRESSES = {name: f"/ip4/10.0.0.{number}/tcp/9090" for number, name in enumerate(KEYS, 1)}
ROUND_S = 2 * FEDERATION_PULL_S + 1.0
_MAP_BYTES = 64 << 20


@dataclass
class Clock:
    """The date under virtual time."""

    clock: VirtualClock

    def unix_ms(self) -> int:
        """Milliseconds since the Unix epoch."""
        return NOW + int(self.clock.now * 1000)


@dataclass
class Running:
    """One orchestrator's process."""

    orchestrator: Orchestrator
    store: LedgerStore
    scope: trio.CancelScope
    ended: trio.Event


@dataclass
class Federated:
    """Some orchestrators of one federation, on one network."""

    folder: Path
    clock: Clock
    fabric: MemoryFabric
    nursery: trio.Nursery
    follows: Mapping[str, str]
    """Whom each orchestrator pins, by their letters."""
    trust_limit: int
    running: dict[str, Running] = field(default_factory=dict)

    async def start(self, name: str, ledger: str | None = None) -> None:
        """Start an orchestrator on the ledger folder ``ledger``, its own by default."""
        self.running[name] = await self.nursery.start(self._run, name, ledger or f"ledger {name}")

    async def _run(self, name: str, ledger: str, *, task_status: trio.TaskStatus[Running]) -> None:
        key, ended = KEYS[name], trio.Event()
        others = self.follows[name]
        with ExitStack() as stack, trio.CancelScope() as scope:
            store = stack.enter_context(closing(LedgerStore(self.folder / ledger, _MAP_BYTES, sync=False)))
            mirrors = Mirrors(
                self.folder / f"federation {name}",
                [KEYS[other].peer_id for other in others],
                self.trust_limit,
                map_size_bytes=_MAP_BYTES,
                sync=False,
            )
            stack.enter_context(closing(mirrors))
            async with MemoryNetwork.open(self.fabric, key.peer_id, ADDRESSES[name]) as network:
                orchestrator = Orchestrator(
                    network,
                    key,
                    self.clock,
                    store,
                    models=[MODEL],
                    recipe=RECIPE,
                    sequencer=ClockSequencer(),
                    mirrors=mirrors,
                    federation={KEYS[other].peer_id: ADDRESSES[other] for other in others},
                    run_blocking=in_place,
                )
                async with trio.open_nursery() as nursery:
                    await nursery.start(orchestrator.run)
                    task_status.started(Running(orchestrator, store, scope, ended))
        ended.set()

    async def stop(self, name: str) -> None:
        """End its process."""
        running = self.running.pop(name)
        running.scope.cancel()
        await running.ended.wait()

    def pay(self, name: str, request_id: str, index: int = 1) -> None:
        """A proof is settled at one of them."""
        key = KEYS[name]
        terms = SettlementTerms(key.peer_id, {ROOT: LAYERS})
        proof = proof_of(key, request_id, index)
        (judged,) = self.running[name].store.settle([proof], terms, self.clock.unix_ms())
        assert judged.settled.status == "settled"

    def own(self, name: str, peer: PeerId = MIDDLE) -> int:
        """A balance in one's own ledger."""
        return self.running[name].store.account(peer).micro_credits

    def foreign(self, name: str, peer: PeerId = MIDDLE) -> int:
        """What counts there of a balance elsewhere."""
        return self.running[name].orchestrator.federating.foreign_balance(peer)

    async def client(self, key: NodeKey, name: str) -> OrchestratorClient:
        """Somebody who asks one of them."""
        network: MemoryNetwork = await self.nursery.start(_keep_open, self.fabric, key)
        return OrchestratorClient(network, key, self.clock, ClockSequencer(), KEYS[name].peer_id, ADDRESSES[name])

    async def standing(self, name: str, other: str) -> m.FederatedPeer:
        """What one says of another, to anybody."""
        answer = await self.running[name].orchestrator.read(m.ReadFederation())
        assert isinstance(answer, m.Federation)
        assert answer.peer_id == KEYS[name].peer_id
        (found,) = [peer for peer in answer.peers if peer.peer_id == KEYS[other].peer_id]
        return found


async def _keep_open(
    fabric: MemoryFabric,
    key: NodeKey,
    address: str | None = None,
    *,
    task_status: trio.TaskStatus[MemoryNetwork] = trio.TASK_STATUS_IGNORED,
) -> None:
    async with MemoryNetwork.open(fabric, key.peer_id, address) as network:
        task_status.started(network)
        await trio.sleep_forever()


async def pass_time(seconds: float = ROUND_S) -> None:
    """Let virtual time pass."""
    with trio.move_on_after(seconds):
        await trio.Event().wait()


def run_federation(
    scenario: Callable[[Federated], Awaitable[None]],
    folder: Path,
    follows: Mapping[str, str],
    trust_limit: int = 1_000 * MICRO_PER_CREDIT,
    started: str | None = None,
) -> None:
    """Run a scenario with these orchestrators; ``started`` are those that run from the beginning, all by default."""
    clock = VirtualClock()

    @asynccontextmanager
    async def federation() -> AsyncIterator[Federated]:
        fabric = MemoryFabric(Random(1), clock, constant_latency(0.01))
        async with trio.open_nursery() as nursery:
            made = Federated(folder, Clock(clock), fabric, nursery, follows, trust_limit)
            for name in follows if started is None else started:
                await made.start(name)
            yield made
            nursery.cancel_scope.cancel()

    async def main() -> None:
        async with federation() as made:
            await scenario(made)

    run_deterministic(main, 5, clock=clock)


# ---- Among honest ones ----


def test_what_is_earned_at_one_counts_at_the_other(tmp_path: Path) -> None:
    async def scenario(made: Federated) -> None:
        made.pay("A", "request-1")
        made.pay("B", "request-1")  # its own ticket, though the name is the same
        made.pay("B", "request-2")
        await pass_time()
        assert (made.own("A"), made.foreign("A")) == (EARNED, 2 * EARNED)
        assert (made.own("B"), made.foreign("B")) == (2 * EARNED, EARNED)
        for name, other, cursor in (("A", "B", 2), ("B", "A", 1)):
            standing = await made.standing(name, other)
            assert (standing.state, standing.cursor, standing.lag, standing.reason) == ("following", cursor, 0, None)
            assert standing.pulled_at is not None
            assert made.running[name].store.total() == 0

    run_federation(scenario, tmp_path, {"A": "B", "B": "A"})


def test_foreign_credits_lift_a_tier_up_to_the_trust_limit(tmp_path: Path) -> None:
    async def scenario(made: Federated) -> None:
        made.pay("A", "request-1")
        made.pay("A", "request-2")
        await pass_time()
        assert made.foreign("B") == EARNED
        worker = await made.client(WORKERS[1], "B")
        grant = m.SessionGrant(
            request_id="request-3", model_id=MODEL_ID, manifest_root=ROOT, recipe=RECIPE, max_positions=10
        )
        assert (await worker.ask(grant, m.Granted)).tier == "Standard"
        assert (await worker.ask(m.ReadCredits(), m.Credits)).micro_credits == EARNED

    run_federation(scenario, tmp_path, {"A": "B", "B": "A"}, trust_limit=EARNED)


def test_a_mirror_that_cannot_be_read_counts_for_nothing_and_refuses_nobody_a_grant(tmp_path: Path) -> None:
    async def scenario(made: Federated) -> None:
        made.pay("A", "request-1")
        made.pay("C", "request-1")
        await pass_time()
        assert made.foreign("B") == 2 * EARNED
        mirrors = made.running["B"].orchestrator.federating._mirrors
        assert mirrors is not None
        mirrors.mirrors[KEYS["A"].peer_id].close()  # what a folder is like whose disk is gone: every read raises
        with capture_logs() as logs:
            client = await made.client(WORKERS[1], "B")
            for number in range(3):
                granted = await client.ask(
                    m.SessionGrant(
                        request_id=f"after-{number}",
                        model_id=MODEL_ID,
                        manifest_root=ROOT,
                        recipe=RECIPE,
                        max_positions=100,
                    ),
                    m.Granted,
                )
                assert granted.tier == "Standard"  # by what C says
        assert made.foreign("B") == EARNED
        assert len([line for line in logs if line["event"] == "mirror_unreadable"]) == 1
        assert (await made.standing("B", "A")).reason == "its mirror cannot be read here"
        assert (await made.standing("B", "C")).state == "following"

    run_federation(scenario, tmp_path, {"A": "B", "B": "AC", "C": "B"})


def test_a_partition_heals_without_a_lost_or_a_doubled_credit(tmp_path: Path) -> None:
    async def scenario(made: Federated) -> None:
        made.pay("A", "before")
        await pass_time()
        made.fabric.partition({KEYS["A"].peer_id: 1, KEYS["B"].peer_id: 2})
        for number in range(20):
            made.pay("A", f"a-{number}")
            made.pay("B", f"b-{number}")
        await pass_time(120.0)
        assert (made.foreign("A"), made.foreign("B")) == (0, EARNED), "what was proven before still counts"
        standing = await made.standing("A", "B")
        assert (standing.state, standing.reason) == ("unreachable", "hop_timeout")
        made.fabric.heal()
        await pass_time(30.0)
        assert (made.own("A"), made.foreign("A")) == (21 * EARNED, 20 * EARNED)
        assert (made.own("B"), made.foreign("B")) == (20 * EARNED, 21 * EARNED)
        assert (await made.standing("A", "B")).state == "following"

    run_federation(scenario, tmp_path, {"A": "B", "B": "A"})


def test_a_restart_goes_on_at_the_cursor(tmp_path: Path) -> None:
    async def scenario(made: Federated) -> None:
        made.pay("A", "request-1")
        await pass_time()
        await made.stop("B")
        made.pay("A", "request-2")
        await made.start("B")
        assert made.foreign("B") == EARNED
        await pass_time()
        assert made.foreign("B") == 2 * EARNED

    run_federation(scenario, tmp_path, {"A": "B", "B": "A"})


def test_a_restored_ledger_is_followed_anew_and_nothing_of_it_counts_twice(tmp_path: Path) -> None:
    async def scenario(made: Federated) -> None:
        made.pay("A", "request-1")
        made.pay("A", "request-2")
        made.running["A"].store.backup(tmp_path / "backup")
        made.pay("A", "request-3")
        await pass_time()
        assert made.foreign("B") == 3 * EARNED
        await made.stop("A")
        chain = restore_ledger(tmp_path / "backup", tmp_path / "restored", made.clock.unix_ms()).chain
        await made.start("A", "restored")
        made.pay("A", "request-3")  # its worker proves it again
        made.pay("A", "request-4")
        await pass_time()
        assert made.own("A") == made.foreign("B") == 4 * EARNED
        standing = await made.standing("B", "A")
        assert (standing.state, standing.chain, standing.cursor) == ("following", chain, 5)

    run_federation(scenario, tmp_path, {"A": "B", "B": "A"})


def test_a_long_ledger_is_pulled_in_pages(tmp_path: Path) -> None:
    async def scenario(made: Federated) -> None:
        for number in range(150):  # two pages, by their bytes
            made.pay("A", f"request-{number}")
        await pass_time()
        assert made.foreign("B") == 150 * EARNED

    run_federation(scenario, tmp_path, {"A": "B", "B": "A"})


# ---- Who may ask ----


def test_an_unknown_puller_is_refused_and_the_operator_is_not(tmp_path: Path) -> None:
    async def scenario(made: Federated) -> None:
        made.pay("A", "request-1")
        stranger = await made.client(key_of("a stranger"), "A")
        with pytest.raises(NotAuthorized, match="federation"):
            await stranger.ask(m.PullSnapshot(chain=0, since=0), m.SnapshotPage)
        page = await made.running["A"].orchestrator.federating.page(m.PullSnapshot(chain=0, since=0))
        assert (page.chain, page.head, len(page.entries)) == (0, 1, 1)
        entry = open_envelope(page.entries[0], m.LEDGER_ENTRY, now_ms=None, signer=KEYS["A"].peer_id)
        assert entry.message(m.LedgerEntry).proof == proof_of(KEYS["A"], "request-1")
        other_chain = await made.running["A"].orchestrator.federating.page(m.PullSnapshot(chain=7, since=0))
        assert (other_chain.chain, other_chain.entries) == (0, ())

    run_federation(scenario, tmp_path, {"A": "B", "B": "A"}, started="A")


def test_a_private_mesh_lets_its_federation_pull(tmp_path: Path) -> None:
    async def scenario(made: Federated) -> None:
        made.running["A"].orchestrator.allow = frozenset()
        made.pay("A", "request-1")
        await pass_time()
        assert made.foreign("B") == EARNED

    run_federation(scenario, tmp_path, {"A": "B", "B": "A"})


# ---- Liars ----


@dataclass
class PaperOrchestrator:
    """Serves `PullSnapshot` alone, and tells each asker the story that is made for it."""

    network: MemoryNetwork
    key: NodeKey
    clock: Clock
    stories: dict[PeerId, PaperIssuer]
    sequencer: ClockSequencer = field(default_factory=ClockSequencer)
    shown_head: Head | None = None
    """A head that is shown in place of the true one."""
    begins_chains: bool = False
    """Whether each answer is of another chain."""
    num_asked: int = 0

    def serve(self) -> None:
        """Answer from now on."""
        self.network.serve(protocols.ORCHESTRATOR, self._serve)

    async def _serve(self, stream: Stream) -> None:
        raw = await receive_message(stream)
        assert raw is not None
        asked = open_envelope(raw, m.REQUEST, now_ms=None, audience=self.key.peer_id)
        request = asked.message(m.RequestBody).body
        assert isinstance(request, m.PullSnapshot)
        story = self.stories[stream.peer]
        self.num_asked += 1
        story.chain += self.begins_chains
        entries = story.page(request.since)[0] if request.chain == story.chain else []
        now_ms = self.clock.unix_ms()
        head = self.shown_head or story.head
        page = m.SnapshotPage(
            chain=head.chain,
            head=head.sequence,
            head_hash=head.hash,
            entries=tuple(entries),
            signed_head=story.sealed_head(head, now_ms),
        )
        body = m.AnswerBody(to=asked.sequence, body=page)
        sequence = self.sequencer.next(m.ANSWER, now_ms)
        await send_message(
            stream, seal(self.key, m.ANSWER, body, sequence=sequence, now_ms=now_ms, audience=stream.peer)
        )


async def paper_orchestrator(made: Federated, name: str, stories: Mapping[str, PaperIssuer]) -> PaperOrchestrator:
    network: MemoryNetwork = await made.nursery.start(_keep_open, made.fabric, KEYS[name], ADDRESSES[name])
    told = {KEYS[listener].peer_id: story for listener, story in stories.items()}
    liar = PaperOrchestrator(network, KEYS[name], made.clock, told)
    liar.serve()
    return liar


def test_an_orchestrator_that_forges_an_entry_is_refused_for_good(tmp_path: Path) -> None:
    async def scenario(made: Federated) -> None:
        issuer = PaperIssuer(KEYS["A"])
        issuer.work()
        await paper_orchestrator(made, "A", {"B": issuer})
        await pass_time()
        assert made.foreign("B") == EARNED
        issuer.entries.append(issuer.entries[0])
        await pass_time()
        standing = await made.standing("B", "A")
        assert standing.state == "refused"
        assert standing.reason is not None
        assert standing.reason.startswith("forged_entry at entry 2")
        assert made.foreign("B") == 0
        issuer.entries.pop()  # too late
        await made.stop("B")
        await made.start("B")
        await pass_time()
        assert (await made.standing("B", "A")).state == "refused"
        assert made.foreign("B") == 0
        evidence = decode_evidence((tmp_path / "federation B" / KEYS["A"].peer_id / "evidence.cbor").read_bytes())
        assert evidence.issuer == KEYS["A"].peer_id
        open_envelope(evidence.statements[-1], m.LEDGER_ENTRY, now_ms=None, signer=KEYS["A"].peer_id)

    run_federation(scenario, tmp_path, {"B": "A"})


def test_an_orchestrator_whose_ledger_was_replaced_without_a_new_chain_is_refused(tmp_path: Path) -> None:
    async def scenario(made: Federated) -> None:
        made.pay("A", "request-1")
        made.pay("A", "request-2")
        await pass_time()
        await made.stop("A")
        await made.start("A", "an empty ledger")
        await pass_time()
        standing = await made.standing("B", "A")
        assert standing.state == "refused"
        assert standing.reason is not None
        assert standing.reason.startswith("equivocation")

    run_federation(scenario, tmp_path, {"A": "B", "B": "A"})


def test_an_orchestrator_that_tells_two_stories_is_found_out_by_its_listeners(tmp_path: Path) -> None:
    async def scenario(made: Federated) -> None:
        stories = {"B": PaperIssuer(KEYS["A"]), "C": PaperIssuer(KEYS["A"])}
        for listener, story in stories.items():
            story.work("for-everybody")
            story.work(f"for-{listener}")
        await paper_orchestrator(made, "A", stories)
        await pass_time(3 * ROUND_S)
        for listener in ("B", "C"):
            assert (await made.standing(listener, "A")).state == "refused"
            assert made.foreign(listener) == 0
            path = tmp_path / f"federation {listener}" / KEYS["A"].peer_id / "evidence.cbor"
            evidence = decode_evidence(path.read_bytes())
            assert evidence.kind == "equivocation"
            assert len(evidence.statements) == 2
            assert (await made.standing(listener, "C" if listener == "B" else "B")).state == "following"

    run_federation(scenario, tmp_path, {"B": "AC", "C": "AB"})


def test_more_entries_that_are_never_shown_are_trouble_and_no_busy_loop(tmp_path: Path) -> None:
    async def scenario(made: Federated) -> None:
        issuer = PaperIssuer(KEYS["A"])
        issuer.work()
        liar = await paper_orchestrator(made, "A", {"B": issuer})
        liar.shown_head = Head(0, 9, bytes(32))
        await pass_time()
        standing = await made.standing("B", "A")
        assert (standing.state, standing.cursor, standing.lag) == ("unreachable", 1, 8)
        assert standing.reason is not None
        assert "shows none" in standing.reason

    run_federation(scenario, tmp_path, {"B": "A"})


def test_one_that_begins_chain_after_chain_is_asked_no_more_often_than_others(tmp_path: Path) -> None:
    async def scenario(made: Federated) -> None:
        liar = await paper_orchestrator(made, "A", {"B": PaperIssuer(KEYS["A"])})
        liar.begins_chains = True
        await pass_time()
        assert 1 < liar.num_asked <= ROUND_S / FEDERATION_PULL_S + 1

    run_federation(scenario, tmp_path, {"B": "A"})


def test_one_that_does_not_answer_holds_up_no_other(tmp_path: Path) -> None:
    async def scenario(made: Federated) -> None:
        made.pay("A", "request-1")
        await pass_time()
        assert (await made.standing("B", "C")).state == "unreachable"
        assert made.foreign("B") == EARNED

    run_federation(scenario, tmp_path, {"A": "B", "B": "AC"})


def test_pins_are_replaced_while_it_runs(tmp_path: Path) -> None:
    """What SIGHUP does: a new one is followed at once, one that left counts no more and may come back where it was left."""

    async def scenario(made: Federated) -> None:
        made.pay("B", "request-1")
        await pass_time()
        orchestrator = made.running["A"].orchestrator
        assert made.foreign("A") == 0
        where = {KEYS["B"].peer_id: ADDRESSES["B"]}
        for _ in range(2):
            await orchestrator.repin(where)
            await pass_time()
            assert made.foreign("A") == made.own("B") > 0
            assert (await made.standing("A", "B")).state == "following"
            await orchestrator.repin(where)  # the same again changes nothing
            await orchestrator.repin({KEYS["B"].peer_id: None})  # and of another address the ledger is the same
            await pass_time()
            assert (await made.standing("A", "B")).state == "following"
            await orchestrator.repin({})
            assert made.foreign("A") == 0
            assert orchestrator.federating.peers == frozenset()
            made.pay("B", f"request-{made.own('B')}")
            await pass_time()

    run_federation(scenario, tmp_path, {"A": "", "B": "A"})
