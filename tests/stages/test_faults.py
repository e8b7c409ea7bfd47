"""An error keeps its code on the way up; whose fault it was is believed of those who can have to do with it alone."""

from __future__ import annotations

import inspect

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessella_p2p.base import errors
from tessella_p2p.base.errors import (
    HopTimeout,
    MalformedMessage,
    RemoteProtocolError,
    StaleEpoch,
    StorageError,
    TessellaError,
)
from tessella_p2p.base.ids import SessionId
from tessella_p2p.ledger.evidence import ProofRefused
from tessella_p2p.stages.faults import error_frame, error_of
from tessella_p2p.wire import messages as m
from tessella_p2p.wire.envelope import encode_message
from tessella_p2p.wire.frames import Frame, Kind
from tests.stages.openings import STAGES, STRANGER

SESSION = SessionId(b"s" * 16)
ME, NEXT, TAIL = (key.peer_id for key in STAGES)
BELOW = {NEXT, TAIL}
PEERS_ERRORS = [
    cls
    for _, cls in inspect.getmembers(errors, inspect.isclass)
    if issubclass(cls, errors.TransportError | errors.RemoteProtocolError | errors.RefusalError | errors.ArtifactError)
]


@pytest.mark.parametrize("cls", PEERS_ERRORS, ids=lambda cls: cls.__name__)
def test_an_error_crosses_a_stage_with_its_code_and_its_fault(cls: type[TessellaError]) -> None:
    error = error_of(error_frame(cls("what happened").blame(TAIL), NEXT, SESSION, 3), NEXT, BELOW)
    assert (type(error), error.peer, str(error)) == (cls, TAIL, "what happened")


def test_who_knows_nobody_at_fault_takes_it() -> None:
    assert error_of(error_frame(StaleEpoch("over"), NEXT, SESSION, 0), NEXT, BELOW).peer == NEXT


def test_a_stage_cannot_blame_a_peer_that_has_nothing_to_do_with_it() -> None:
    frame = error_frame(HopTimeout("it was them").blame(STRANGER.peer_id), NEXT, SESSION, 0)
    assert error_of(frame, NEXT, BELOW).peer == NEXT


@pytest.mark.parametrize("code", [StorageError.code, ProofRefused.code, "no such code"])
def test_a_code_that_no_peer_can_mean_is_an_error_all_the_same(code: str) -> None:
    body = m.ErrorBody(code=code.replace(" ", "-"), reason="x", met_by=NEXT, fault_of=TAIL)
    error = error_of(Frame(Kind.ERROR, SESSION, 0, body=encode_message(body)), NEXT, BELOW)
    assert (type(error), error.peer) == (RemoteProtocolError, TAIL)


@given(st.binary(max_size=200))
def test_an_error_that_cannot_be_read_is_its_senders_fault(body: bytes) -> None:
    error = error_of(Frame(Kind.ERROR, SESSION, 0, body=body), NEXT, BELOW)
    assert isinstance(error, MalformedMessage)
    assert error.peer == NEXT


@given(st.text(st.characters(), max_size=2000))
def test_any_words_fit_a_frame_and_none_of_them_moves_a_terminals_cursor(reason: str) -> None:
    error = error_of(error_frame(StaleEpoch(reason), NEXT, SESSION, 0), NEXT, BELOW)
    assert str(error).isprintable()
    assert len(str(error)) <= 1024
