"""The asking half of ``/tessella/orchestrator/1``: one request envelope out, one answer envelope in, on a stream of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn, Protocol, TypeVar

import trio

from tessella_p2p.base.clock import WallClock
from tessella_p2p.base.errors import (
    HopTimeout,
    InvalidSignature,
    LocalProtocolError,
    RemoteProtocolError,
    Replayed,
    StreamReset,
    error_from_code,
)
from tessella_p2p.base.ids import PeerId
from tessella_p2p.base.limits import MAX_ENVELOPE_BYTES, ORCHESTRATOR_REQUEST_S, TOPOLOGY_SILENCE_S
from tessella_p2p.net.framing import receive_message, send_message
from tessella_p2p.net.network import Network, Stream
from tessella_p2p.wire import protocols
from tessella_p2p.wire.envelope import Envelope, Message, Sequencer, open_envelope, seal
from tessella_p2p.wire.keys import NodeKey
from tessella_p2p.wire.messages import (
    ANSWER,
    REQUEST,
    Acknowledged,
    AnswerBody,
    OrchestratorAnswer,
    OrchestratorRequest,
    ReadIdentity,
    Refused,
    RequestBody,
    Stages,
    Subscribe,
)

AnswerT = TypeVar("AnswerT", bound=Message)


class OrchestratorPort(Protocol):
    """What a node asks its orchestrators through: one of them (`OrchestratorClient`), or whichever answers (``failover``)."""

    @property
    def orchestrator(self) -> PeerId:
        """Who is asked now."""
        ...

    @property
    def orchestrators(self) -> tuple[PeerId, ...]:
        """Everybody who may answer, the preferred one first: this node's pins. What they signed counts, whoever is asked now."""
        ...

    def at(self, orchestrator: PeerId) -> OrchestratorClient | None:
        """The way to one of them, for what concerns it alone; None where it is not pinned."""
        ...

    async def call(self, body: OrchestratorRequest, timeout_s: float = ORCHESTRATOR_REQUEST_S) -> OrchestratorAnswer:
        """See `OrchestratorClient.call`."""
        ...

    async def ask(
        self, body: OrchestratorRequest, answer: type[AnswerT], timeout_s: float = ORCHESTRATOR_REQUEST_S
    ) -> AnswerT:
        """See `OrchestratorClient.ask`."""
        ...

    async def follow(self, request: Subscribe, take: Callable[[Stages | Acknowledged], None]) -> NoReturn:
        """See `OrchestratorClient.follow`."""
        ...


class OrchestratorClient:
    """Asks one pinned orchestrator. Tasks may ask at the same time.

    Args:
        network: opens the streams; its identity is the asker's.
        key: signs the requests.
        clock: dates them.
        sequencer: numbers them.
        orchestrator: the only peer whose answers count; it comes from this node's own configuration.
        address: multiaddr at which it can be dialled, with or without ``/p2p/…``; None when the network knows it.
    """

    def __init__(
        self,
        network: Network,
        key: NodeKey,
        clock: WallClock,
        sequencer: Sequencer,
        orchestrator: PeerId,
        address: str | None,
    ) -> None:
        self.orchestrator = orchestrator
        self._network = network
        self._key = key
        self._clock = clock
        self._sequencer = sequencer
        self._address = None if address is None else address.partition("/p2p/")[0]

    @property
    def orchestrators(self) -> tuple[PeerId, ...]:
        """See `OrchestratorPort`."""
        return (self.orchestrator,)

    def at(self, orchestrator: PeerId) -> OrchestratorClient | None:
        """See `OrchestratorPort`."""
        return self if orchestrator == self.orchestrator else None

    async def call(self, body: OrchestratorRequest, timeout_s: float = ORCHESTRATOR_REQUEST_S) -> OrchestratorAnswer:
        """Ask, and wait for the answer. A cancellation resets the stream; the request may or may not have been served.

        Raises:
            DialError, StreamReset, HopTimeout: the orchestrator cannot be reached, or did not answer in time.
            RefusalError, ...: it refused; the error is the one that it named, see `error_from_code`.
            RemoteProtocolError: the answer is not its answer to this request.
        """
        request, sequence = self._sealed(body)
        with trio.move_on_after(timeout_s):
            return self._opened(await self._exchange(request), sequence)[1]
        raise HopTimeout(f"the orchestrator {self.orchestrator} did not answer {body.kind} within {timeout_s:g} s")

    async def ask(
        self, body: OrchestratorRequest, answer: type[AnswerT], timeout_s: float = ORCHESTRATOR_REQUEST_S
    ) -> AnswerT:
        """`call`, for a request that has one kind of answer.

        Raises:
            RemoteProtocolError: also when the answer is of another kind.
        """
        got = await self.call(body, timeout_s)
        if not isinstance(got, answer):
            raise RemoteProtocolError(f"the orchestrator answered {body.kind} with {got.kind}").blame(self.orchestrator)
        return got

    async def follow(self, request: Subscribe, take: Callable[[Stages | Acknowledged], None]) -> NoReturn:
        """Subscribe to a model's topology, and give ``take`` what comes: at first the whole list, then what is news, now and then the
        whole list again, and `Acknowledged` when there is nothing new. It ends with an error, however long that takes. A
        cancellation resets the stream.

        Raises:
            DialError, StreamReset, HopTimeout: the orchestrator cannot be reached, or is gone: nothing came for `TOPOLOGY_SILENCE_S`.
            VersionMismatch: it has no such stream; ask for the list.
            RefusalError, ...: it refused, see `error_from_code`.
            RemoteProtocolError: what came is none of its answers to this request, or an old one.
        """
        sealed, sequence = self._sealed(request)
        newest = 0
        with trio.move_on_after(ORCHESTRATOR_REQUEST_S) as patience:
            stream = await self._opened_stream(protocols.TOPOLOGY)
            try:
                await send_message(stream, sealed)
                while True:
                    patience.deadline = trio.current_time() + TOPOLOGY_SILENCE_S
                    envelope, body = self._opened(await self._received(stream), sequence)
                    if envelope.sequence <= newest:
                        raise Replayed(f"{self.orchestrator} told its news again").blame(self.orchestrator)
                    newest = envelope.sequence
                    if not isinstance(body, Stages | Acknowledged):
                        raise RemoteProtocolError(f"a topology stream that brings {body.kind}").blame(self.orchestrator)
                    take(body)
            finally:
                with trio.CancelScope(shield=True):
                    await stream.reset()
        raise HopTimeout(f"the orchestrator {self.orchestrator} said nothing for {TOPOLOGY_SILENCE_S:g} s")

    async def clock_ahead_ms(self, timeout_s: float = ORCHESTRATOR_REQUEST_S) -> int:
        """How far the orchestrator's clock is ahead of this machine's, to within half a round trip. A cancellation resets the stream.

        Raises:
            DialError, StreamReset, HopTimeout: as `call`.
            RemoteProtocolError: the answer is not its answer; a refusal is one, for it is dated as well.
        """
        request, _ = self._sealed(ReadIdentity())
        asked_ms = self._clock.unix_ms()
        with trio.move_on_after(timeout_s):
            raw = await self._exchange(request)
            here_ms = (asked_ms + self._clock.unix_ms()) // 2
            envelope = open_envelope(raw, ANSWER, now_ms=None, audience=self._key.peer_id, signer=self.orchestrator)
            return envelope.issued_at - here_ms
        raise HopTimeout(f"the orchestrator {self.orchestrator} did not answer within {timeout_s:g} s")

    def _sealed(self, body: OrchestratorRequest) -> tuple[bytes, int]:
        """A request, and its sequence. Raises `LocalProtocolError` for one that is too long."""
        now_ms = self._clock.unix_ms()
        sequence = self._sequencer.next(REQUEST, now_ms)
        request = seal(
            self._key, REQUEST, RequestBody(body=body), sequence=sequence, now_ms=now_ms, audience=self.orchestrator
        )
        if len(request) > MAX_ENVELOPE_BYTES:
            raise LocalProtocolError(f"a {body.kind} request of {len(request)} bytes: send less at once")
        return request, sequence

    async def _opened_stream(self, protocol: str) -> Stream:
        if self._address is not None:
            self._network.add_addresses(self.orchestrator, [self._address])
        return await self._network.open_stream(self.orchestrator, protocol)

    async def _received(self, stream: Stream) -> bytes:
        answer = await receive_message(stream, MAX_ENVELOPE_BYTES)
        if answer is None:
            raise StreamReset(f"the orchestrator {self.orchestrator} closed the stream without an answer")
        return answer

    async def _exchange(self, request: bytes) -> bytes:
        stream = await self._opened_stream(protocols.ORCHESTRATOR)
        try:
            await send_message(stream, request)
            answer = await self._received(stream)
        except BaseException:  # also a cancellation: a stream in the middle of an exchange is of no use to anybody
            with trio.CancelScope(shield=True):
                await stream.reset()
            raise
        await stream.aclose()
        return answer

    def _opened(self, raw: bytes, sequence: int) -> tuple[Envelope, OrchestratorAnswer]:
        envelope = open_envelope(
            raw, ANSWER, now_ms=self._clock.unix_ms(), audience=self._key.peer_id, signer=self.orchestrator
        )
        answer = envelope.message(AnswerBody)
        refused = isinstance(answer.body, Refused)
        # What was no envelope to the orchestrator had no sequence either.
        if answer.to != sequence and not (refused and answer.to == 0):
            raise InvalidSignature(f"an answer of {self.orchestrator} to request {answer.to}, not to {sequence}").blame(
                self.orchestrator
            )
        if isinstance(answer.body, Refused):
            raise error_from_code(answer.body.code, answer.body.reason)
        if isinstance(answer.body, Stages) and answer.body.issuer not in (None, self.orchestrator):
            raise RemoteProtocolError(f"{self.orchestrator} revokes leases of {answer.body.issuer}").blame(
                self.orchestrator
            )
        return envelope, answer.body
