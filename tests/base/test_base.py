"""Ranges and the tree of errors."""

from __future__ import annotations

import inspect

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessella_p2p.base import errors
from tessella_p2p.base.errors import (
    ArtifactError,
    ConfigurationError,
    LocalProtocolError,
    NoRoute,
    RefusalError,
    RemoteProtocolError,
    StaleEpoch,
    StorageError,
    TessellaError,
    TransportError,
    error_from_code,
)
from tessella_p2p.base.ids import LayerRange, PeerId
from tessella_p2p.ledger.evidence import ProofRefused

EVERY_ERROR = [cls for _, cls in inspect.getmembers(errors, inspect.isclass) if issubclass(cls, TessellaError)]
LOCAL = (ConfigurationError, StorageError, LocalProtocolError)


@pytest.mark.parametrize("cls", EVERY_ERROR, ids=lambda cls: cls.__name__)
def test_an_error_crosses_the_wire_by_its_code_unless_it_is_about_this_machine(cls: type[TessellaError]) -> None:
    again = error_from_code(cls.code, "what happened")
    assert "what happened" in str(again)
    if issubclass(cls, LOCAL) or cls is TessellaError:
        assert type(again) is RemoteProtocolError
    else:
        assert type(again) is cls


@given(st.text(max_size=40), st.text(max_size=40))
def test_any_code_gives_an_error_of_a_peer(code: str, message: str) -> None:
    error = error_from_code(code, message)
    assert isinstance(error, RemoteProtocolError | TransportError | RefusalError | ArtifactError)


def test_a_code_of_another_modules_error_is_no_way_to_crash_a_node() -> None:
    assert ProofRefused.code == "proof_refused"  # its constructor takes more than a message
    assert type(error_from_code(ProofRefused.code, "what happened")) is RemoteProtocolError


def test_codes_are_unique_and_every_error_has_an_http_status() -> None:
    own = [cls for cls in EVERY_ERROR if cls is not TessellaError and not issubclass(cls, LocalProtocolError)]
    assert len({cls.code for cls in own}) == len(own)
    assert all(400 <= cls.http_status < 600 for cls in EVERY_ERROR)


def test_the_tree_in_the_docstring_is_the_tree() -> None:
    assert errors.__doc__ is not None
    assert all(cls.__name__ in errors.__doc__ for cls in EVERY_ERROR)


def test_the_first_to_blame_a_peer_is_believed() -> None:
    error = StaleEpoch("over")
    assert error.peer is None
    assert error.blame(PeerId("a")).blame(PeerId("b")) is error
    assert error.peer == "a"
    assert StaleEpoch("another").peer is None


def test_a_missing_route_names_its_holes() -> None:
    assert NoRoute("no", missing=((3, 5),)).missing == ((3, 5),)
    assert NoRoute("no").missing == ()


RANGES = st.tuples(st.integers(0, 20), st.integers(1, 10)).map(lambda pair: LayerRange(pair[0], pair[0] + pair[1]))


@given(RANGES, RANGES)
def test_ranges_are_sets_of_layers(a: LayerRange, b: LayerRange) -> None:
    layers_a, layers_b = set(a), set(b)
    assert len(a) == len(layers_a)
    assert a.overlaps(b) == bool(layers_a & layers_b) == b.overlaps(a)
    assert a.contains(b) == (layers_b <= layers_a)
    assert LayerRange(*a.as_tuple()) == a


@pytest.mark.parametrize(("start", "end"), [(0, 0), (5, 5), (5, 4), (-1, 3)])
def test_an_empty_or_negative_range_is_none(start: int, end: int) -> None:
    with pytest.raises(ValueError, match="no range"):
        LayerRange(start, end)
