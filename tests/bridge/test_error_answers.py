"""Every error of the tree has one answer."""

from __future__ import annotations

import pytest

from tessella_p2p.base import errors
from tessella_p2p.base.errors import (
    ArtifactError,
    InvalidStep,
    PromptTooLong,
    RemoteProtocolError,
    StreamReset,
    TessellaError,
)
from tessella_p2p.base.ids import PeerId
from tessella_p2p.bridge.errors import error_answer

EVERY_CLASS = [cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, TessellaError)]


@pytest.mark.parametrize("cls", EVERY_CLASS)
def test_each_class_keeps_its_code_and_status(cls: type[TessellaError]) -> None:
    answer = error_answer(cls("what happened"))

    error = answer.body["error"]
    assert answer.status == (502 if issubclass(cls, RemoteProtocolError) else cls.http_status)
    assert error["code"] == ("context_length_exceeded" if cls is PromptTooLong else cls.code)
    assert error["type"] == ("server_error" if answer.status >= 500 else "invalid_request_error")
    assert ("retry-after" in answer.headers) is (answer.status == 503)


def test_a_peers_broken_rule_is_no_fault_of_the_client_and_names_the_peer() -> None:
    answer = error_answer(InvalidStep("wrong shape").blame(PeerId("12D3KooWTail")))

    assert answer.status == 502
    assert answer.body["error"]["peer_id"] == "12D3KooWTail"
    assert "peer_id" not in error_answer(StreamReset("gone")).body["error"]


def test_what_this_node_did_wrong_is_not_told_to_clients() -> None:
    answer = error_answer(ArtifactError("/models/secret.gguf is truncated"))

    assert answer.status == 500
    assert b"secret" not in answer.json()
    assert answer.body["error"]["code"] == "artifact_error"
