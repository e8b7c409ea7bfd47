"""Several orchestrators: who is asked, and when."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from random import Random

import pytest
import trio

from tessella_p2p.base.errors import LocalProtocolError, Overloaded, TransportError
from tessella_p2p.base.ids import PeerId
from tessella_p2p.base.limits import ORCHESTRATOR_PROBE_S
from tessella_p2p.ledger.client import OrchestratorClient
from tessella_p2p.ledger.failover import FailoverClient
from tessella_p2p.net.framing import receive_message, send_message
from tessella_p2p.net.memory import MemoryFabric, MemoryNetwork, constant_latency
from tessella_p2p.net.network import Stream
from tessella_p2p.net.virtual_clock import VirtualClock, run_deterministic
from tessella_p2p.wire import messages as m
from tessella_p2p.wire import protocols
from tessella_p2p.wire.envelope import ClockSequencer, open_envelope, seal
from tests.ledger.proving import NOW, ROOT, key_of

ASKER = key_of("asker")
KEYS = [key_of("first"), key_of("second"), key_of("third")]
ADDRESSES = [f"/ip4/10.0.0.{number}/tcp/9090" for number in range(1, 4)]


class Clock:
    """One moment."""

    def unix_ms(self) -> int:
        """Milliseconds since the Unix epoch."""
        return NOW


@dataclass
class PaperOrchestrator:
    """Answers `ReadCredits` and `ReadIdentity`, and says nothing more on a topology stream than that it is there."""

    fabric: MemoryFabric
    nursery: trio.Nursery
    index: int
    asked: Counter[str] = field(default_factory=Counter)
    refuses: bool = False
    scope: trio.CancelScope | None = None
    sequencer: ClockSequencer = field(default_factory=ClockSequencer)

    @property
    def peer_id(self) -> PeerId:
        """Its identity."""
        return KEYS[self.index].peer_id

    async def start(self) -> None:
        """Serve from now on."""
        self.scope = await self.nursery.start(self._run)

    def crash(self) -> None:
        """Be gone at once."""
        assert self.scope is not None
        self.fabric.crash(self.peer_id)
        self.scope.cancel()

    async def _run(self, *, task_status: trio.TaskStatus[trio.CancelScope]) -> None:
        with trio.CancelScope() as scope:
            async with MemoryNetwork.open(self.fabric, self.peer_id, ADDRESSES[self.index]) as network:
                network.serve(protocols.ORCHESTRATOR, self._answer)
                network.serve(protocols.TOPOLOGY, self._tell)
                task_status.started(scope)
                await trio.sleep_forever()

    async def _read(self, stream: Stream) -> tuple[m.OrchestratorRequest, int]:
        raw = await receive_message(stream)
        assert raw is not None
        envelope = open_envelope(raw, m.REQUEST, now_ms=None, audience=self.peer_id, signer=ASKER.peer_id)
        request = envelope.message(m.RequestBody).body
        self.asked[request.kind] += 1
        return request, envelope.sequence

    async def _send(self, stream: Stream, to: int, body: m.OrchestratorAnswer) -> None:
        sealed = seal(
            KEYS[self.index],
            m.ANSWER,
            m.AnswerBody(to=to, body=body),
            sequence=self.sequencer.next(m.ANSWER, NOW),
            now_ms=NOW,
            audience=stream.peer,
        )
        await send_message(stream, sealed)

    async def _answer(self, stream: Stream) -> None:
        request, sequence = await self._read(stream)
        if self.refuses:
            await self._send(stream, sequence, m.Refused(code="overloaded", reason="full"))
        elif isinstance(request, m.ReadIdentity):
            await self._send(stream, sequence, m.Identity(peer_id=self.peer_id, addresses=()))
        else:
            # Whose answer it is shows in the balance.
            await self._send(stream, sequence, m.Credits(micro_credits=self.index, tier="Standard", settled_proofs=0))

    async def _tell(self, stream: Stream) -> None:
        _, sequence = await self._read(stream)
        while True:
            await self._send(stream, sequence, m.Stages(records=(), health="incomplete"))
            await pass_time(5.0)


@dataclass
class World:
    """A node with three orchestrators."""

    client: FailoverClient
    orchestrators: list[PaperOrchestrator]
    nursery: trio.Nursery

    async def ask(self) -> int:
        """Who answers."""
        return (await self.client.ask(m.ReadCredits(), m.Credits, 3.0)).micro_credits

    def num_asked(self) -> list[int]:
        """How often each was asked for the balance."""
        return [each.asked["read_credits"] for each in self.orchestrators]


async def pass_time(seconds: float) -> None:
    with trio.move_on_after(seconds):
        await trio.Event().wait()


def run_world(scenario: Callable[[World], Awaitable[None]]) -> None:
    clock = VirtualClock()

    @asynccontextmanager
    async def world() -> AsyncIterator[World]:
        fabric = MemoryFabric(Random(1), clock, constant_latency(0.01))
        async with (
            trio.open_nursery() as nursery,
            MemoryNetwork.open(fabric, ASKER.peer_id) as network,
        ):
            sequencer = ClockSequencer()
            clients = [
                OrchestratorClient(network, ASKER, Clock(), sequencer, key.peer_id, address)
                for key, address in zip(KEYS, ADDRESSES, strict=True)
            ]
            orchestrators = [PaperOrchestrator(fabric, nursery, index) for index in range(3)]
            for orchestrator in orchestrators:
                await orchestrator.start()
            client = FailoverClient(clients)
            nursery.start_soon(client.run)
            yield World(client, orchestrators, nursery)
            nursery.cancel_scope.cancel()

    async def main() -> None:
        async with world() as made:
            await scenario(made)

    run_deterministic(main, 5, clock=clock)


def test_the_first_is_asked_while_it_answers() -> None:
    async def scenario(made: World) -> None:
        for _ in range(3):
            assert await made.ask() == 0
        assert made.num_asked() == [3, 0, 0]
        assert made.client.orchestrator == KEYS[0].peer_id
        assert made.client.orchestrators == tuple(key.peer_id for key in KEYS)

    run_world(scenario)


def test_the_next_one_is_asked_within_the_same_request_and_first_from_then_on() -> None:
    async def scenario(made: World) -> None:
        made.orchestrators[0].crash()
        assert await made.ask() == 1
        assert made.client.orchestrator == KEYS[1].peer_id
        started = trio.current_time()
        assert await made.ask() == 1
        assert trio.current_time() - started < 0.1, "nobody waits for one that is known to be down"
        made.orchestrators[1].crash()
        assert await made.ask() == 2

    run_world(scenario)


def test_a_preferred_one_that_answers_again_is_asked_again() -> None:
    async def scenario(made: World) -> None:
        made.orchestrators[0].crash()
        made.orchestrators[1].crash()
        assert await made.ask() == 2
        await made.orchestrators[1].start()
        await pass_time(ORCHESTRATOR_PROBE_S + 4.0)
        assert await made.ask() == 1
        await made.orchestrators[0].start()
        await pass_time(ORCHESTRATOR_PROBE_S + 4.0)
        assert await made.ask() == 0
        assert made.num_asked()[1] == 1, "no request is spent on finding out"

    run_world(scenario)


def test_a_refusal_is_an_answer() -> None:
    async def scenario(made: World) -> None:
        made.orchestrators[0].refuses = True
        with pytest.raises(Overloaded):
            await made.ask()
        assert made.num_asked() == [1, 0, 0]
        assert made.client.orchestrator == KEYS[0].peer_id

    run_world(scenario)


def test_one_that_refuses_the_probe_is_there() -> None:
    async def scenario(made: World) -> None:
        made.orchestrators[0].crash()
        assert await made.ask() == 1
        made.orchestrators[0].refuses = True
        await made.orchestrators[0].start()
        await pass_time(ORCHESTRATOR_PROBE_S + 4.0)
        assert made.client.orchestrator == KEYS[0].peer_id

    run_world(scenario)


def test_where_nobody_answers_everybody_is_tried_each_time() -> None:
    async def scenario(made: World) -> None:
        for orchestrator in made.orchestrators:
            orchestrator.crash()
        for _ in range(2):
            with pytest.raises(TransportError):
                await made.ask()
        await made.orchestrators[2].start()
        assert await made.ask() == 2

    run_world(scenario)


def test_what_concerns_one_of_them_goes_there_whoever_is_asked() -> None:
    async def scenario(made: World) -> None:
        second = made.client.at(KEYS[1].peer_id)
        assert second is not None
        assert (await second.ask(m.ReadCredits(), m.Credits)).micro_credits == 1
        assert made.client.orchestrator == KEYS[0].peer_id
        assert made.client.at(ASKER.peer_id) is None

    run_world(scenario)


def test_a_followed_one_that_is_gone_is_replaced_and_followed_again_when_it_is_back() -> None:
    async def scenario(made: World) -> None:
        heard: list[m.Stages | m.Acknowledged] = []

        async def follow() -> None:
            await made.client.follow(m.Subscribe(manifest_root=ROOT), heard.append)

        made.nursery.start_soon(follow)
        await pass_time(1.0)
        assert [each.asked["subscribe"] for each in made.orchestrators] == [1, 0, 0]
        made.orchestrators[0].crash()
        await pass_time(20.0)
        assert [each.asked["subscribe"] for each in made.orchestrators] == [1, 1, 0]
        await made.orchestrators[0].start()
        await pass_time(ORCHESTRATOR_PROBE_S + 4.0)
        assert [each.asked["subscribe"] for each in made.orchestrators] == [2, 1, 0]
        assert len(heard) > 5

    run_world(scenario)


def test_following_ends_where_nobody_answers() -> None:
    async def scenario(made: World) -> None:
        for orchestrator in made.orchestrators:
            orchestrator.crash()
        with pytest.raises(TransportError):
            await made.client.follow(m.Subscribe(manifest_root=ROOT), lambda _: None)

    run_world(scenario)


def test_nobody_to_ask_is_our_own_bug() -> None:
    with pytest.raises(LocalProtocolError):
        FailoverClient([])
