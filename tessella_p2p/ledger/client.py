"""The asking half of ``/tessella/orchestrator/1``: one request envelope out, one answer envelope in, on a stream of its own."""

from __future__ import annotations

from typing import TypeVar

import trio

from tessella_p2p.base.clock import WallClock
from tessella_p2p.base.errors import (
    HopTimeout,
    InvalidSignature,
    LocalProtocolError,
    RemoteProtocolError,
    StreamReset,
    error_from_code,
)
from tessella_p2p.base.ids import PeerId
from tessella_p2p.base.limits import MAX_ENVELOPE_BYTES, ORCHESTRATOR_REQUEST_S
from tessella_p2p.net.framing import receive_message, send_message
from tessella_p2p.net.network import Network
from tessella_p2p.wire import protocols
from tessella_p2p.wire.envelope import Message, Sequencer, open_envelope, seal
from tessella_p2p.wire.keys import NodeKey
from tessella_p2p.wire.messages import (
    ANSWER,
    REQUEST,
    AnswerBody,
    OrchestratorAnswer,
    OrchestratorRequest,
    Refused,
    RequestBody,
)

AnswerT = TypeVar("AnswerT", bound=Message)


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

    async def call(self, body: OrchestratorRequest, timeout_s: float = ORCHESTRATOR_REQUEST_S) -> OrchestratorAnswer:
        """Ask, and wait for the answer. A cancellation resets the stream; the request may or may not have been served.

        Raises:
            DialError, StreamReset, HopTimeout: the orchestrator cannot be reached, or did not answer in time.
            RefusalError, ...: it refused; the error is the one that it named, see `error_from_code`.
            RemoteProtocolError: the answer is not its answer to this request.
        """
        now_ms = self._clock.unix_ms()
        sequence = self._sequencer.next(REQUEST, now_ms)
        request = seal(
            self._key, REQUEST, RequestBody(body=body), sequence=sequence, now_ms=now_ms, audience=self.orchestrator
        )
        if len(request) > MAX_ENVELOPE_BYTES:
            raise LocalProtocolError(f"a {body.kind} request of {len(request)} bytes: send less at once")
        with trio.move_on_after(timeout_s):
            return self._opened(await self._exchange(request), sequence)
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

    async def _exchange(self, request: bytes) -> bytes:
        if self._address is not None:
            self._network.add_addresses(self.orchestrator, [self._address])
        stream = await self._network.open_stream(self.orchestrator, protocols.ORCHESTRATOR)
        try:
            await send_message(stream, request)
            answer = await receive_message(stream, MAX_ENVELOPE_BYTES)
        except BaseException:
            with trio.CancelScope(shield=True):
                await stream.reset()
            raise
        await stream.aclose()
        if answer is None:
            raise StreamReset(f"the orchestrator {self.orchestrator} closed the stream without an answer")
        return answer

    def _opened(self, raw: bytes, sequence: int) -> OrchestratorAnswer:
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
        return answer.body
