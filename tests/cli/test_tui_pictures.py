"""What the terminal UI reads and draws of the mesh: any picture fits, names nobody, and tells without colour."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessella_p2p.base.errors import (
    ConfigurationError,
    MalformedMessage,
    NoRoute,
    Overloaded,
    TessellaError,
    TransportError,
)
from tessella_p2p.bridge.mesh_picture import flights_json, mesh_json
from tessella_p2p.cli.asking import Answer
from tessella_p2p.cli.tui.joined import daemon_arguments
from tessella_p2p.cli.tui.picture import Picture, read_picture
from tessella_p2p.cli.tui.swarm import _MAX_NUMBERED, Numbers, spark, swarm_picture
from tessella_p2p.cli.tui.words import (
    answer_line,
    credits_text,
    explained,
    holes_of,
    number,
    shown,
    status_text,
    way_line,
)
from tessella_p2p.entry.api import Caller
from tests.bridge.bridge_doubles import MODEL
from tests.cli.tui_world import SELF, WHOLE, SeeingNode, peer

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=12,
)
LAYERS = st.tuples(st.integers(0, 40), st.integers(0, 40)).map(sorted).filter(lambda pair: pair[0] < pair[1])


def event(*stages: Any) -> dict[str, Any]:
    """What ``GET /events`` sends of a mesh of these stages."""
    node = SeeingNode(stages=stages)
    return {**mesh_json(node.status(), node.peers(None), (MODEL,), (), 0), **flights_json((), Caller())}


def drawn(picture: Picture, width: int = 80) -> list[str]:
    return swarm_picture(picture, width, Numbers()).plain.splitlines()


def test_the_picture_that_a_node_sends_is_read() -> None:
    picture = read_picture(event(*WHOLE))
    assert (picture.model.id, picture.model.total_layers, picture.num_stages) == (MODEL, 30, 2)


@given(st.dictionaries(st.sampled_from(["model", "coverage", "stages", "flights", "credits"]), JSON))
def test_any_other_picture_is_an_error_and_none_that_is_unexpected(wrong: dict[str, Any]) -> None:
    try:
        picture = read_picture({**event(*WHOLE), **wrong})
    except MalformedMessage:
        return
    assert drawn(picture)


@given(st.lists(LAYERS, max_size=6), st.integers(74, 160))
def test_a_picture_fits_its_width_and_counts_replicas_in_every_cell(ranges: list[list[int]], width: int) -> None:
    others = [(start, min(end, 30)) for start, end in ranges if start < 30]
    stages = [peer(SELF, 0, 12), *(peer(f"12D3KooWPeer{n}", *layers) for n, layers in enumerate(others))]
    lines = drawn(read_picture(event(*stages)), width)
    assert all(len(line) <= width for line in lines[2:] if "nobody serves" not in line)
    assert not any("12D3KooW" in line for line in lines)
    row = next(line for line in lines if line.startswith("f32"))[14:]
    for layer in range(30):
        held = sum(stage.layer_ranges[0].start <= layer < stage.layer_ranges[0].end for stage in stages)
        cell = (2 * layer + 1) * len(row) // 60  # the middle of the layer
        assert row[cell] == (str(held) if held else "·")


def test_a_hole_too_narrow_for_a_cell_is_still_seen() -> None:
    lines = drawn(read_picture(event(peer("a", 0, 14), peer("b", 15, 30))), 34)
    assert "·" in next(line for line in lines if line.startswith("f32"))
    assert any("nobody serves 14–15" in line for line in lines)


def test_a_peer_keeps_its_number() -> None:
    numbers = Numbers()
    assert [numbers.of(name) for name in ("a", "b", "a", "c")] == [1, 2, 1, 3]


def test_a_node_that_invents_peers_fills_no_memory() -> None:
    numbers = Numbers()
    assert max(numbers.of(str(n)) for n in range(_MAX_NUMBERED + 10)) == _MAX_NUMBERED
    with pytest.raises(MalformedMessage, match="peer_id"):
        read_picture(event(peer("x" * 1000, 0, 30)))


@pytest.mark.parametrize(
    ("values", "wanted"),
    [((), ""), ((0.0, 0.0), ""), ((0.0, 4.0, 8.0), "▄█"), ((-1.0, 1.0), "█"), ((1.0, 0.0, 1.0), "█ █")],
)
def test_rates_are_bars(values: tuple[float, ...], wanted: str) -> None:
    assert spark(values) == wanted


@given(JSON)
def test_whatever_a_node_says_of_itself_is_a_text_without_control_characters(body: Any) -> None:
    said = (
        body if isinstance(body, dict) else {"state": body, "orchestrator": body, "layer_ranges": body, "credits": body}
    )
    answer = Answer(report={"route": [body, {"layers": body, "hop_ms": body}], "timings": body, "tier": body}, usage={})
    for text in (status_text(said, "http://x"), credits_text(said), answer_line(answer, "m"), way_line(answer)):
        assert not any(ord(c) < 32 and c != "\n" for c in text)


@given(st.text(), st.integers(1, 80))
def test_a_name_is_one_line_of_a_bounded_length(text: str, most: int) -> None:
    assert len(shown(text, most)) <= most
    assert "\n" not in shown(text, most)


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (NoRoute("no"), "/swarm"),
        (Overloaded("full"), "wait"),
        (TransportError("gone"), "/connect"),
        (ConfigurationError("wrong"), None),
    ],
)
def test_an_error_is_said_with_what_to_do(error: TessellaError, advice: str | None) -> None:
    said, _, what = explained(error).partition("\n")
    assert said == str(error)
    assert (advice in what) if advice else not what


@pytest.mark.parametrize(
    ("value", "wanted"), [(True, "–"), (None, "–"), ("7", "–"), (1e300, "–"), (1234.56, "1,234.6")]
)
def test_what_is_no_number_is_a_dash(value: object, wanted: str) -> None:
    assert number(value) == wanted


def test_many_holes_are_not_all_named() -> None:
    assert holes_of([(n, n + 1) for n in range(20)]).endswith("7–8 and 12 more")


def test_flags_of_a_daemon_come_from_settings() -> None:
    assert daemon_arguments({"vram_mb": 512, "layers": None}) == ["--vram-mb", "512"]
