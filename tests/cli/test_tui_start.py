"""How the terminal UI finds its node: what it asks, what it remembers, what wins; joining; and a real terminal."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
import trio
from click.testing import CliRunner
from textual import events

from tessella_p2p.base.clock import SystemClock
from tessella_p2p.base.errors import ConfigurationError
from tessella_p2p.bridge.api_keys import ApiKeys, new_key
from tessella_p2p.bridge.authorising import KeyRing
from tessella_p2p.cli.client_file import ClientFile
from tessella_p2p.cli.main import cli
from tessella_p2p.cli.tui.goal import Goal, goal_of, operator_of
from tessella_p2p.cli.tui.remembered import Remembered, default_path, read_remembered, remember
from tessella_p2p.cli.tui.wishes import Wishes
from tests.bridge.bridge_doubles import ANSWER, SpeakingEntry, app_for, serving
from tests.cli.terminal_double import terminal
from tests.cli.tui_world import (
    OPERATOR,
    OTHER_OPERATOR,
    NodeThread,
    SeeingNode,
    a_person,
    attached,
    looks,
    ui_file,
)

NOBODY = "/ip4/127.0.0.1/tcp/1"
"""Where no orchestrator answers."""


@pytest.fixture(autouse=True)
def _nothing_of_this_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    for module in ("linked_app", "wishes"):
        # a node that really runs on this machine is none of a test's business
        monkeypatch.setattr(f"tessella_p2p.cli.tui.{module}.DEFAULT_API_URL", "http://127.0.0.1:1")


# ---- the first start, and those after it ----


def test_the_first_start_asks_once_and_pins_the_operator_that_the_node_names() -> None:
    async def first() -> None:
        async with a_person(Wishes()) as person:
            await person.see("Which mesh?")
            await person.type(node.url)
            await person.see("linked to", "its operator is", OPERATOR)

    async def second() -> None:
        async with a_person(Wishes()) as person:
            assert "Which mesh?" not in await person.see("linked to", "answers")

    with NodeThread(SpeakingEntry()) as node:
        looks(first)
        assert read_remembered(ui_file()) == Remembered(api_url=node.url, operator=OPERATOR)
        assert stat.S_IMODE(ui_file().stat().st_mode) == 0o600
        looks(second)


def test_a_node_of_another_operator_is_refused_until_the_user_agrees() -> None:
    async def look() -> None:
        async with a_person(Wishes()) as person:
            await person.see("Which mesh?", "follows another operator")
            assert "linked to" not in person.screen()
            await person.press("down", "ctrl+u")
            await person.press("enter")
            await person.see("linked to")

    with NodeThread(SpeakingEntry(), SeeingNode(operator=OTHER_OPERATOR)) as node:
        remember(ui_file(), Remembered(api_url=node.url, operator=OPERATOR))
        looks(look)
        assert read_remembered(ui_file()).operator == OTHER_OPERATOR


def test_flags_win_and_are_not_remembered() -> None:
    kept = Remembered(api_url="http://127.0.0.1:1", operator=OTHER_OPERATOR, model_id="kept")

    async def look() -> None:
        async with a_person(Wishes(api_url=node.url, model_id="toy")) as person:
            await person.see("linked to", "toy")

    with NodeThread(SpeakingEntry()) as node:
        remember(ui_file(), kept)
        before = ui_file().read_bytes()
        looks(look)
        assert ui_file().read_bytes() == before


def test_what_is_no_address_is_said_and_asked_again() -> None:
    async def look() -> None:
        async with a_person(Wishes()) as person:
            await person.see("Which mesh?")
            await person.type("127.0.0.1:8080")
            await person.see("write http://127.0.0.1:8080 for a node")
            await person.press("ctrl+u")
            await person.type(NOBODY)
            await person.see("who it is")
            assert person.ui.focused is not None
            assert person.ui.focused.id == "operator"  # that is what was missing
            await person.press("up", "ctrl+u")
            await person.type("http://127.0.0.1:1")
            await person.see("no node answers at")
            await person.press("escape")
            await person.until(lambda: not person.ui.is_running, "the end")

    looks(look)


def test_a_node_that_wants_a_key_gets_one_and_nobody_else_does() -> None:
    secret, key = new_key(os.urandom, label="", now_ms=SystemClock().unix_ms(), limits=None)

    async def first() -> None:
        async with a_person(Wishes()) as person:
            await person.see("Which mesh?")
            await person.type(node.url)
            await person.see("asks for an API key")
            asked = person.ui.screen
            await person.type("tsl-wrong")
            await person.until(lambda: person.ui.screen is not asked, "the next screen")
            await person.see("asks for an API key")
            await person.type(secret)
            screen = await person.see("linked to", "answers")
            assert secret not in screen
            await person.type("hello")
            await person.see("".join(ANSWER))

    async def second() -> None:
        async with a_person(Wishes()) as person:
            await person.see("linked to", "answers")

    with NodeThread(SpeakingEntry(), keys=KeyRing(ApiKeys([key]), SystemClock())) as node:
        looks(first)
        kept = read_remembered(ui_file())
        assert kept.api_key == secret
        assert Wishes(remembered=kept).key_for("http://127.0.0.1:9") is None
        looks(second)


def test_each_key_goes_only_where_it_was_meant_to() -> None:
    kept = Remembered(api_url="http://127.0.0.1:5", api_key="kept")
    wishes = Wishes(api_key="flag", remembered=kept, client=ClientFile(api_url="http://127.0.0.1:6", api_key="file"))
    assert wishes.key_for("http://127.0.0.1:5") == "flag"
    assert wishes.key_for("http://127.0.0.1:6") == "file"
    assert wishes.key_for("http://127.0.0.1:7") is None
    joined = Wishes(remembered=Remembered(mesh=NOBODY, api_key="kept"))
    assert joined.key_for("http://127.0.0.1:1") == "kept"  # this machine's node
    assert joined.key_for("http://127.0.0.1:2") is None
    named = Wishes(api_url="http://127.0.0.1:7/", api_key="flag", remembered=kept)
    assert (named.key_for("http://127.0.0.1:7"), named.key_for("http://127.0.0.1:5")) == ("flag", "kept")


def test_a_known_node_that_asks_for_a_key_by_now_is_asked_with_it_from_then_on() -> None:
    secret, key = new_key(os.urandom, label="", now_ms=SystemClock().unix_ms(), limits=None)

    async def look() -> None:
        async with a_person(Wishes()) as person:
            await person.see("asks for an API key", "kept in ui.toml")
            await person.type(secret)
            await person.see("linked to")

    with NodeThread(SpeakingEntry(), keys=KeyRing(ApiKeys([key]), SystemClock())) as node:
        remember(ui_file(), Remembered(api_url=node.url, operator=OPERATOR, model_id="m"))
        looks(look)
        kept = Remembered(api_url=node.url, api_key=secret, operator=OPERATOR, model_id="m")
        assert read_remembered(ui_file()) == kept


def test_another_node_can_be_chosen_while_it_runs() -> None:
    async def look() -> None:
        async with attached(one) as person:
            await person.type("/connect")
            await person.see("Which mesh?")
            await person.press("escape")
            await person.type("hello")
            await person.see("".join(ANSWER))
            await person.type("/connect")
            await person.see("Which mesh?")
            await person.press("ctrl+u")
            await person.type(two.url)
            await person.see(f"linked to {two.url}")
            await person.type("again")
            await person.until(lambda: len(two.entry.asked) == 1, "a question to the other node")

    with NodeThread(SpeakingEntry()) as one, NodeThread(SpeakingEntry()) as two:
        looks(look)


# ---- joining ----


def test_a_mesh_without_a_node_here_is_joined_by_a_child_that_leaves_when_it_is_told() -> None:
    address = f"{NOBODY}/p2p/{OPERATOR}"

    async def look() -> None:
        async with a_person(Wishes(), size=(100, 40)) as person:
            await person.see("Which mesh?")
            await person.type(address)
            await person.see("Join with this machine?", "Memory to claim", "smollm2-135m-instruct")
            await person.press("down", "ctrl+u")
            await person.type("0")
            await person.see("the claim = '0'", "greater than or equal to")
            await person.press("ctrl+u")
            await person.type("512")
            await person.see("starting › [registering] › loading › ready")
            (child,) = person.ui.started
            assert child.runs
            process = child._process
            assert process is not None
            for _ in range(2):  # impatient
                person.ui.post_message(events.Key("escape", None))
            await person.see("Which mesh?")
            assert process.returncode is not None  # not before it has ended
            assert not child.log_path.exists()

    looks(look)
    assert not ui_file().exists()  # it was not joined


def test_a_child_that_cannot_start_says_why_and_can_be_tried_again(tmp_path: Path) -> None:
    key = tmp_path / "config" / "node.key"
    key.parent.mkdir()
    key.write_text("no key")
    key.chmod(0o600)

    async def look() -> None:
        async with a_person(Wishes(mesh=f"{NOBODY}/p2p/{OPERATOR}"), size=(100, 40)) as person:
            await person.see("Join with this machine?", "smollm2-135m-instruct")
            await person.press("enter")
            await person.see("the node ended with status 2", "is damaged", "Enter tries again")

    looks(look)


# ---- the pure parts ----


@pytest.mark.parametrize(
    ("address", "operator", "wanted"),
    [
        (" http://127.0.0.1:8080/ ", "", ("http://127.0.0.1:8080", None, None)),
        ("https://node.example", OPERATOR, ("https://node.example", None, OPERATOR)),
        (f"/ip4/192.0.2.1/tcp/9090/p2p/{OPERATOR}", "", (None, "/ip4/192.0.2.1/tcp/9090", OPERATOR)),
        ("/dns4/mesh.example/tcp/9090", OPERATOR, (None, "/dns4/mesh.example/tcp/9090", OPERATOR)),
        (f"tcp://{OPERATOR}@192.0.2.1:9090", "", (None, "/ip4/192.0.2.1/tcp/9090", OPERATOR)),
    ],
)
def test_an_address_is_a_node_or_a_mesh(address: str, operator: str, wanted: tuple[str | None, ...]) -> None:
    goal = goal_of(address, operator)
    assert (goal.api_url, goal.mesh and goal.mesh.address, goal.operator) == wanted


@pytest.mark.parametrize(
    ("address", "operator"),
    [
        ("", ""),
        ("http://user:pw@host", ""),
        ("http://host", "no-key"),
        ("/ip4/192.0.2.1/tcp/9090", ""),
        (f"/ip4/192.0.2.1/tcp/9090/p2p/{OPERATOR}", OTHER_OPERATOR),
        ("ftp://host", OPERATOR),
    ],
)
def test_what_is_neither_is_refused(address: str, operator: str) -> None:
    with pytest.raises(ConfigurationError):
        goal_of(address, operator)


@pytest.mark.parametrize(
    "status", [{}, {"orchestrator": None}, {"orchestrator": {}}, {"orchestrator": {"peer_id": "x"}}]
)
def test_a_node_that_names_no_operator_pins_none(status: dict[str, object]) -> None:
    assert operator_of(status) is None


def test_comments_of_the_file_stay_and_what_is_forgotten_goes(tmp_path: Path) -> None:
    path = tmp_path / "ui.toml"
    remember(path, Remembered(api_url="http://127.0.0.1:1", model_id="m"))
    path.write_text(path.read_text() + "# mine\n")
    remember(path, Remembered(mesh="/ip4/192.0.2.1/tcp/1"))
    assert read_remembered(path) == Remembered(mesh="/ip4/192.0.2.1/tcp/1")
    assert "# mine" in path.read_text()


@pytest.mark.parametrize("damage", [b"[[[", b"\xff"])
def test_a_file_that_was_damaged_meanwhile_is_left_as_it_is(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "ui.toml"
    path.write_bytes(damage)
    with pytest.raises(ConfigurationError, match="left as it is"):
        remember(path, Remembered(model_id="m"))
    assert path.read_bytes() == damage


@pytest.mark.parametrize(
    ("text", "mode", "word"),
    [
        ("api_url = 1", 0o600, "api_url"),
        ('nonsense = "x"', 0o600, "nonsense"),
        ("[[[", 0o600, "no TOML"),
        ('api_key = "x"', 0o644, "chmod 600"),
        ("#" * (1 << 17), 0o600, "is refused"),
    ],
)
def test_a_damaged_file_is_an_error_that_names_it(tmp_path: Path, text: str, mode: int, word: str) -> None:
    path = tmp_path / "ui.toml"
    path.write_text(text)
    path.chmod(mode)
    with pytest.raises(ConfigurationError, match=word):
        read_remembered(path)


def test_wishes_are_taken_in_order() -> None:
    client = ClientFile(api_url="http://127.0.0.1:3")
    kept = Remembered(api_url="http://127.0.0.1:2", operator=OPERATOR)
    assert Wishes().goal() is None
    assert Wishes(client=client).goal() == Goal(api_url="http://127.0.0.1:3")
    assert Wishes(client=client, remembered=kept).goal() == Goal(api_url="http://127.0.0.1:2", operator=OPERATOR)
    assert Wishes(api_url="http://127.0.0.1:1", remembered=kept).goal() == Goal(api_url="http://127.0.0.1:1")


# ---- the command ----


def test_without_a_terminal_a_command_is_missing() -> None:
    result = CliRunner().invoke(cli, ["-a", "http://127.0.0.1:1"])
    assert result.exit_code == 2


async def test_on_a_real_terminal_it_chats_and_leaves(tmp_path: Path) -> None:
    environ = {"TESSELLA_CONFIG_DIR": str(tmp_path / "config"), "XDG_STATE_HOME": str(tmp_path / "state")}
    async with serving(app_for(SpeakingEntry())) as url, terminal("-a", url, environ=environ) as person:
        await person.see("linked to")
        await person.type("hello\r")
        await person.see("Paris")
        await person.see("tok/s")
        await person.type("\x04")
        with trio.fail_after(15):
            assert await person.ended() == 0
    assert not default_path({"TESSELLA_CONFIG_DIR": str(tmp_path / "config")}).exists()
