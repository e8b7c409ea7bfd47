"""ERROR frames: what a stage tells its upstream of the end of a session, and what of it is believed (pure).

An error travels from where it was met up to the entry, made anew at each stage. Whose fault it was is a peer's word: it may name
only who can have to do with it, and it decides preferences, never payment.
"""

from __future__ import annotations

from collections.abc import Collection

from tessella_p2p.base.errors import RemoteProtocolError, TessellaError, error_from_code
from tessella_p2p.base.ids import PeerId, SessionId
from tessella_p2p.base.limits import MAX_REFUSAL_CHARS
from tessella_p2p.wire import messages as m
from tessella_p2p.wire.envelope import decode_message, encode_message
from tessella_p2p.wire.frames import Frame, Kind


def error_frame(error: TessellaError, met_by: PeerId, session: SessionId, epoch: int) -> Frame:
    """The ERROR frame for ``error``, which this node (``met_by``) met or heard of. When no peer is at fault, it takes the blame."""
    reason = _printable(str(error))[:MAX_REFUSAL_CHARS]
    body = m.ErrorBody(code=error.code, reason=reason, met_by=met_by, fault_of=error.peer or met_by)
    return Frame(Kind.ERROR, session, epoch, body=encode_message(body))


def error_of(frame: Frame, sender: PeerId, may_blame: Collection[PeerId]) -> TessellaError:
    """The error that an ERROR frame of ``sender`` states, with the peer at fault.

    Args:
        may_blame: peers whose fault it can be; if another one is named, or nothing can be read, the fault is the sender's.
    """
    try:
        body = decode_message(m.ErrorBody, bytes(frame.body))
    except RemoteProtocolError as error:
        return error.blame(sender)
    fault_of = PeerId(body.fault_of)
    return error_from_code(body.code, _printable(body.reason)).blame(fault_of if fault_of in may_blame else sender)


def _printable(text: str) -> str:
    """A peer's words may end up in a log and on a terminal."""
    return "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text)
