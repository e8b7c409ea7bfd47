"""What reaches the log, and what never does."""

from __future__ import annotations

import io
import json
import logging
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog
import torch
from hypothesis import given
from hypothesis import strategies as st

from tessella_p2p.base.errors import DialError
from tessella_p2p.base.ids import LayerRange
from tessella_p2p.node.log import MAX_TEXT_CHARS, SECRET_FIELDS, configure_logging, redact, unlogged

SECRET = "the prompt of somebody"


@pytest.fixture
def out() -> io.StringIO:
    stream = io.StringIO()
    configure_logging("info", "auto", stream)
    return stream


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def shown(**fields: object) -> dict[str, Any]:
    return dict(redact(None, "info", {"event": "e", **fields}))


def test_lines_are_json_where_no_terminal_reads(out: io.StringIO) -> None:
    structlog.get_logger("tessella_p2p.x").info("up", layers=LayerRange(0, 10), path=Path("/a"), tokens=5, ok=True)
    (line,) = lines(out)
    assert line.pop("timestamp").endswith("Z")
    assert line == {
        "event": "up", "level": "info", "logger": "tessella_p2p.x", "layers": "0–10", "path": "/a", "tokens": 5, "ok": True
    }  # fmt: skip


def test_the_level_holds_for_us_and_libraries_speak_at_warning(out: io.StringIO) -> None:
    structlog.get_logger("tessella_p2p.x").debug("too little")
    logging.getLogger("somelibrary.part").info("too much")
    logging.getLogger("somelibrary.part").warning("worth it")
    assert [(line["event"], line["logger"]) for line in lines(out)] == [("worth it", "somelibrary.part")]


def test_warnings_of_python_are_lines_too(out: io.StringIO) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(False)
        logging.captureWarnings(True)
        warnings.warn("old", DeprecationWarning, stacklevel=1)
    assert "DeprecationWarning: old" in lines(out)[0]["event"]


@pytest.mark.parametrize("name", sorted(SECRET_FIELDS))
def test_a_field_that_names_content_shows_its_size_only(name: str) -> None:
    for value in (SECRET, SECRET.encode(), [SECRET], {"a": SECRET}, np.ones((3, 4))):
        assert SECRET not in str(shown(**{name: value}))
        assert SECRET not in str(shown(**{name.upper(): value}))
        assert SECRET not in str(shown(outer={name: value}))
    assert shown(**{name: 7})[name] == 7


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (b"abc", "<3 bytes>"),
        (bytearray(4), "<4 bytes>"),
        (memoryview(bytes(8)), "<8 bytes>"),
        (np.zeros((2, 3), np.float32), "<ndarray [2, 3] float32>"),
        (object(), "<object>"),
        ((b"abc", 1), ["<3 bytes>", 1]),
        (list(range(1000)), "<1000 items>"),
        (DialError("no"), "DialError: no"),
    ],
)
def test_values_that_could_carry_content_show_their_kind(value: object, wanted: object) -> None:
    assert shown(value=value)["value"] == wanted


def test_a_tensor_of_torch_shows_its_shape() -> None:
    torch.set_num_threads(1)
    assert shown(value=torch.zeros(2, 3))["value"] == "<Tensor [2, 3] torch.float32>"


def test_a_long_text_is_cut() -> None:
    assert len(shown(reason="x" * 100_000)["reason"]) < MAX_TEXT_CHARS + 40


def test_what_contains_itself_ends() -> None:
    loop: list[object] = []
    loop.append(loop)
    assert "items" in str(shown(value=loop))


@given(
    st.recursive(
        st.binary(min_size=8, max_size=16).map(lambda raw: raw + SECRET.encode()),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
        max_leaves=8,
    )
)
def test_bytes_never_get_in_however_deep(value: object) -> None:
    assert SECRET not in json.dumps(shown(value=value))


@pytest.mark.parametrize("form", ["console", "json"])
def test_a_traceback_shows_no_local_variables(form: str) -> None:
    stream = io.StringIO()
    configure_logging("info", form, stream)
    hidden = SECRET.upper()
    try:
        raise DialError("unreachable")
    except DialError:
        structlog.get_logger("tessella_p2p.x").exception("failed")
    assert hidden
    assert "DialError: unreachable" in stream.getvalue()
    assert hidden not in stream.getvalue()


def test_bytes_among_a_librarys_arguments_show_their_size(out: io.StringIO) -> None:
    logging.getLogger("somelibrary.part").warning("read %s of %d from %s", SECRET.encode(), 5, "peer")
    assert lines(out)[0]["event"] == f"read <{len(SECRET)} bytes> of 5 from peer"


def test_console_lines_are_for_people() -> None:
    stream = io.StringIO()
    configure_logging("debug", "console", stream)
    structlog.get_logger("tessella_p2p.x").debug("up", prompt=SECRET)
    assert "up" in stream.getvalue()
    assert SECRET not in stream.getvalue()


def test_a_command_that_says_itself_what_failed_can_drop_what_libraries_say(out: io.StringIO) -> None:
    library = logging.getLogger("tests.library_with_a_level_of_its_own")
    library.setLevel(logging.ERROR)

    def fail() -> None:
        with unlogged():
            library.error("fail to open connection")
            structlog.get_logger("tessella_p2p.tests").error("so do we")
            raise DialError("nobody is there")

    with pytest.raises(DialError):
        fail()
    assert lines(out) == []
    library.error("heard again")
    assert [line["event"] for line in lines(out)] == ["heard again"]
