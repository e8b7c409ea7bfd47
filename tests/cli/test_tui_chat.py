"""The terminal UI in use: questions, answers, commands; against a node's real HTTP surface."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from textual import events

from tessella_p2p.base.errors import NoRoute, Overloaded
from tessella_p2p.cli.node_client import event_of
from tessella_p2p.cli.terminal import printable
from tessella_p2p.cli.tui.transcript import _LINE_CHARS, _next_piece
from tessella_p2p.cli.tui.wishes import Wishes
from tessella_p2p.entry.readiness import ModelReadiness
from tests.bridge.bridge_doubles import ANSWER, MODEL, NO_ROUTE, SpeakingEntry
from tests.cli.tui_world import SELF, NodeThread, Person, SeeingNode, a_person, attached, looks, peer

TEXT = "".join(ANSWER)


@pytest.fixture(autouse=True)
def _history_of_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def said(entry: SpeakingEntry, asked: int = -1) -> list[str]:
    messages = entry.asked[asked].messages
    assert messages is not None
    return [str(message["content"]) for message in messages]


def test_an_answer_comes_with_its_tier_its_speed_and_its_way() -> None:
    async def look() -> None:
        async with attached(node) as person:
            await person.type("hello")
            screen = await person.see(TEXT, "34.0 tok/s")
            assert "> hello" in screen
            assert "Standard paid" in screen
            assert "first 12 ms" in screen
            assert "0–12 1.5 ms › 12–30 2.5 ms" in screen
            assert "12D3KooWTail" not in screen

    with NodeThread(SpeakingEntry()) as node:
        looks(look)


def test_the_next_question_goes_on_with_the_conversation_until_a_new_one_begins() -> None:
    async def look() -> None:
        async with attached(node) as person:
            await person.type("one")
            await person.see(TEXT, "tok/s")
            await person.type("two")
            await person.until(lambda: len(node.entry.ends) == 2, "a second answer")
            await person.see("> two")
            await person.until(lambda: person.screen().count(TEXT) == 2, "the second answer on the screen")
            await person.type("/new")
            await person.until(lambda: TEXT not in person.screen(), "an empty screen")
            await person.type("three")
            await person.see(TEXT)

    with NodeThread(SpeakingEntry()) as node:
        looks(look)
        assert said(node.entry, 1) == ["one", TEXT, "two"]
        assert said(node.entry, 2) == ["three"]


@pytest.mark.parametrize("key", ["escape", "ctrl+c"])
def test_a_key_ends_an_answer_at_the_node_and_what_came_is_kept(key: str) -> None:
    async def look() -> None:
        async with attached(node) as person:
            await person.type("one")
            await person.see("The capital")
            await person.press(key)
            await person.see("stopped")
            await person.until(lambda: node.entry.ends == ["cancelled"], "the end at the node")
            node.entry.hold_after = None
            await person.type("two")
            await person.see("Paris.")

    with NodeThread(SpeakingEntry(hold_after=2)) as node:
        looks(look)
        assert said(node.entry, 1) == ["one", "The capital", "two"]


def test_a_second_question_waits_for_the_first_answer_and_is_not_lost() -> None:
    async def look() -> None:
        async with attached(node) as person:
            await person.type("one")
            await person.see("The capital")
            await person.type("early")
            await person.see("an answer is under way", "early")
            node.call(node.entry.release.set)
            await person.see(TEXT, "tok/s")
            await person.press("enter")
            await person.see("> early")

    with NodeThread(SpeakingEntry(hold_after=2)) as node:
        looks(look)


def test_of_two_questions_in_one_breath_the_second_one_waits() -> None:
    async def look() -> None:
        async with attached(node) as person:
            await person.type("one\ntwo")
            await person.see("The capital", "an answer is under way")
            assert person.ui._prompt.text == "two"
            assert len(node.entry.asked) == 1

    with NodeThread(SpeakingEntry(hold_after=2)) as node:
        looks(look)


def test_a_new_conversation_holds_nothing_of_the_answer_that_it_ended() -> None:
    async def look() -> None:
        async with attached(node) as person:
            await person.type("one")
            await person.see("The capital")
            await person.type("/new")
            await person.until(lambda: node.entry.ends == ["cancelled"], "the end at the node")
            node.entry.hold_after = None
            await person.type("two")
            screen = await person.see(TEXT, "tok/s")
            assert "stopped" not in screen
            assert "> one" not in screen

    with NodeThread(SpeakingEntry(hold_after=2)) as node:
        looks(look)
        assert said(node.entry, 1) == ["two"]


def test_a_question_before_there_is_a_node_is_given_back() -> None:
    async def look() -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            async with a_person(Wishes(api_url=f"http://127.0.0.1:{silent.getsockname()[1]}")) as person:
                await person.type("early")
                await person.see("no node is linked yet", "> early")

    looks(look)


def test_an_answer_that_never_ends_is_stopped() -> None:
    async def look() -> None:
        async with attached(node) as person:
            await person.type("one")
            await person.see("longer than any", "not part of the conversation")

    with NodeThread(SpeakingEntry(words=["w" * 1000] * 200)) as node:
        looks(look)


_BLANK = str.maketrans("", "", " \n")


@given(st.lists(st.sampled_from(["a", " ", "\n", "b" * 700, "c" * 9000, "d " * 1500]), max_size=30))
def test_pieces_of_an_answer_are_bounded_and_lose_nothing(parts: list[str]) -> None:
    text = "".join(parts)
    pieces = []
    piece, rest = _next_piece(text)
    while piece:
        pieces.append(piece)
        piece, rest = _next_piece(rest)
    pieces.append(rest)
    assert all(len(each) <= _LINE_CHARS for each in pieces)
    assert "".join(pieces).translate(_BLANK) == text.translate(_BLANK)


def test_half_of_a_surrogate_pair_is_a_character_that_can_be_written() -> None:
    for text in (r'{"a": "x\ud800y \ud83d\ude00"}', r'{"a": "x\uD800y \uD83D\uDE00"}'):
        assert event_of(text) == {"a": "x\ufffdy \U0001f600"}
    assert printable("a\udcffb") == "ab"


def test_what_is_pasted_or_asked_before_does_not_drive_the_terminal(tmp_path: Path) -> None:
    history = tmp_path / "state" / "tessella-p2p" / "chat_history"
    history.parent.mkdir(parents=True)
    history.write_text("\n# then\n+old\x1b]0;t\x07\n")

    async def look() -> None:
        async with attached(node) as person:
            await person.until(lambda: person.ui._prompt._history != [], "the history")
            person.ui.post_message(events.Paste("a\x1b[31m\x07\rb\u202e"))
            await person.see("a[31m")
            assert person.ui._prompt.text == "a[31m\nb"
            await person.press("ctrl+c", "up")
            assert person.ui._prompt.text == "old]0;t"

    with NodeThread(SpeakingEntry()) as node:
        looks(look)


def test_a_history_that_cannot_be_written_stops_no_question(tmp_path: Path) -> None:
    history = tmp_path / "state" / "tessella-p2p" / "chat_history"

    async def look() -> None:
        async with attached(node) as person:
            await person.until(lambda: person.ui._history is not None, "the history")
            history.unlink()
            history.mkdir()
            await person.type("one")
            await person.see(TEXT)

    with NodeThread(SpeakingEntry()) as node:
        looks(look)


@pytest.mark.parametrize(
    ("refusal", "advice"),
    [(NO_ROUTE, "/swarm shows which layers"), (Overloaded("the stage is full"), "wait a little, and ask again")],
)
def test_a_refusal_is_said_with_what_to_do_and_leaves_the_conversation_as_it_was(refusal: NoRoute, advice: str) -> None:
    async def look() -> None:
        async with attached(node) as person:
            await person.type("one")
            await person.see(str(refusal)[:30], advice)
            node.entry.refusal = None
            await person.press("up", "enter")
            await person.see(TEXT)

    with NodeThread(SpeakingEntry(refusal=refusal)) as node:
        looks(look)
        assert said(node.entry) == ["one"]


def test_an_answer_that_fails_in_its_middle_is_shown_and_is_no_part_of_the_conversation() -> None:
    async def look() -> None:
        async with attached(node) as person:
            await person.type("one")
            await person.see("The capital", "nobody serves layers 12–20", "not part of the conversation")
            node.entry.fail_after = None
            await person.type("two")
            await person.see(TEXT)

    with NodeThread(SpeakingEntry(fail_after=2, failure=NO_ROUTE)) as node:
        looks(look)
        assert said(node.entry) == ["two"]


HOSTILE = ("[bold red]loud[/]", " [@click=app.quit]press[/]", " <img src=x>", " \x1b[31m\x1b]0;title\x07", " a\u202eb")


def test_what_a_model_writes_is_text_whatever_it_looks_like() -> None:
    async def look() -> None:
        async with attached(node) as person:
            await person.type("go")
            screen = await person.see("[bold red]loud[/] [@click=app.quit]press[/] <img src=x> [31m]0;title ab")
            assert not any(c in screen for c in "\x1b\x07\u202e")

    with NodeThread(SpeakingEntry(words=HOSTILE)) as node:
        looks(look)


def test_names_of_peers_and_models_are_text_and_peers_are_numbered() -> None:
    attack = "[red]evil[/]\x1b[2J<img src=x>"
    stages = (peer(SELF, 0, 12), peer(attack, 12, 30), peer("12D3KooWThird", 12, 30, "Saturated", recipe="[b]r"))

    async def look() -> None:
        async with attached(node) as person:
            await person.type("/swarm")
            screen = await person.see("hop ms", "1 (you)", "[b]r")
            assert "evil" not in screen
            assert "12D3KooW" not in screen
            assert "192.0.2.7" not in screen
            await person.press("escape")
            await person.type("/model")
            await person.see("Which model?", "[red]evil[/][2J<img src=x>")
            await person.press("escape")
            await person.type("/status")
            await person.see("orchestrator")

    with NodeThread(SpeakingEntry(models=(MODEL, attack)), SeeingNode(stages=stages)) as node:
        looks(look)


def test_the_swarm_shows_a_hole_in_words_and_says_when_the_node_is_lost() -> None:
    stages = (peer(SELF, 0, 12), peer("12D3KooWFar", 12, 20, "Offline"), peer("12D3KooWTail", 20, 30))
    node = NodeThread(
        SpeakingEntry(), SeeingNode(stages=stages, readiness=ModelReadiness("no_route", None, ((12, 20),)))
    )

    async def look() -> None:
        with node:
            async with a_person(Wishes(api_url=node.url)) as person:
                await person.type("/swarm")
                screen = await person.see("does not answer: layers 12–20 are missing", "hole: nobody serves 12–20")
                coverage = next(line for line in screen.splitlines() if line.startswith(" f32"))
                assert set(coverage.split()[1]) == {"1", "·"}
                assert "offline" in screen
                node.stop()
                await person.see("the node does not answer; this is the last picture")

    looks(look)


def test_a_node_that_comes_back_is_asked_again_in_the_same_conversation() -> None:
    async def look() -> None:
        with NodeThread(SpeakingEntry()) as node:
            async with attached(node) as person:
                await person.type("one")
                await person.see(TEXT, "tok/s")
                node.stop()
                await person.see("the node does not answer")
                await person.type("lost")
                await person.see("no node answers at", "Up brings the question back")
                with NodeThread(back, port=int(node.url.rpartition(":")[2])):
                    await person.see("answers · 2 stages")
                    await person.press("up", "enter")
                    await person.until(lambda: back.ends == ["closed"], "an answer")

    back = SpeakingEntry()
    looks(look)
    assert said(back) == ["one", TEXT, "lost"]


def test_another_model_is_asked_from_the_moment_that_it_is_chosen() -> None:
    async def look() -> None:
        async with attached(node) as person:
            await person.type("one")
            await person.see(TEXT)
            await person.type("/model")
            await person.see("Which model?")
            await person.press("down", "enter")
            await person.see("other is asked from now on")
            await person.type("two")
            await person.until(lambda: len(node.entry.asked) == 2, "a second request")
            await person.type("/model nowhere")
            await person.see("nowhere is not answered here now")
            await person.type(f"/model {MODEL}")
            await person.see(f"{MODEL} is asked from now on")

    with NodeThread(SpeakingEntry(models=(MODEL, "other"))) as node:
        looks(look)
        assert [asked.model for asked in node.entry.asked] == [MODEL, "other"]


def test_status_and_credits_tell_what_the_node_says() -> None:
    async def look() -> None:
        async with attached(node) as person:
            await person.type("/status")
            await person.see("layers 0–12 in f32", "3 of 4", "8,192 tokens", "orchestrator")
            await person.type("/credits")
            await person.see("1.500", "Standard", "3 settled, 1 open, 2 on their way, 4 held back, 5 refused")

    with NodeThread(SpeakingEntry()) as node:
        looks(look)


def test_a_saved_conversation_is_one_that_the_client_goes_on_with(tmp_path: Path) -> None:
    async def look() -> None:
        async with attached(node, (120, 40)) as person:
            await person.type("/save s.json")
            await person.see("nothing has been said yet")
            await person.type("one")
            await person.see(TEXT)
            for name in ("s.json", "s.json", "s.md"):
                await person.type(f"/save {name}")
            await person.until(lambda: person.screen().count("saved:") == 3, "three files")
            await person.type("/save taken.md")
            await person.see("exists, and is not written over")
            await person.type("/save ~nobody-of-this-name/x")
            await person.see("is no name of a file")
            await person.type(f"/save {'x' * 300}")
            await person.see("it cannot be written")

    (tmp_path / "taken.md").write_text("mine")
    with pytest.MonkeyPatch.context() as patch, NodeThread(SpeakingEntry()) as node:
        patch.chdir(tmp_path)
        looks(look)
    saved = json.loads((tmp_path / "s.json").read_text())
    assert saved["messages"] == [{"role": "user", "content": "one"}, {"role": "assistant", "content": TEXT}]
    assert (tmp_path / "s.json").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "s.md").read_text() == f"## You\n\none\n\n## Answer\n\n{TEXT}\n"
    assert (tmp_path / "taken.md").read_text() == "mine"


def test_commands_complete_and_unknown_ones_are_said() -> None:
    async def look() -> None:
        async with attached(node) as person:
            await person.press("slash", "s")
            await person.see("/swarm  /status  /save")
            await person.press("w", "tab")
            await person.see("the mesh, live and anonymous")
            await person.press("enter")
            await person.see("peers are numbered")
            await person.press("ctrl+c")
            await person.type("/nonsense")
            await person.see("/nonsense is no command")
            await person.type("/help")
            await person.see("/credits", "Tab completes")
            await person.type(" /slash")
            await person.see("> /slash", TEXT)

    with NodeThread(SpeakingEntry()) as node:
        looks(look)
        assert said(node.entry) == ["/slash"]


def test_what_was_asked_before_comes_back_by_a_key_also_after_another_start() -> None:
    async def first() -> None:
        async with attached(node) as person:
            await person.until(lambda: person.ui._history is not None, "the history")
            await person.type("one")
            await person.see(TEXT)
            await person.press("d", "up")
            assert person.ui._prompt.text == "one"
            await person.press("down")
            assert person.ui._prompt.text == "d"
            await person.press("ctrl+c", "a", "ctrl+j", "b", "up", "up")
            assert person.ui._prompt.text == "one"

    async def second() -> None:
        async with attached(node) as person:
            await person.until(lambda: person.ui._history is not None, "the history")
            await person.press("up")
            assert person.ui._prompt.text == "one"

    with NodeThread(SpeakingEntry()) as node:
        looks(first)
        looks(second)


async def _everything_is_there(person: Person, width: int, height: int) -> None:
    await person.pilot.resize_terminal(width, height)
    await person.pilot.pause()
    screen = person.screen().splitlines()
    assert len(screen) == height
    assert all(len(line) <= width for line in screen)
    assert screen[0].startswith(" Tessella")
    assert any("Ask something" in line for line in screen)


def test_it_can_be_used_in_any_size_and_without_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")

    async def look() -> None:
        async with attached(node) as person:
            assert person.ui.no_color
            await person.type("hello")
            await person.see(TEXT)
            for width, height in ((200, 60), (40, 12), (80, 24)):
                await _everything_is_there(person, width, height)
            await person.type("/swarm")
            await person.see("stages healthy")
            await person.pilot.resize_terminal(40, 12)
            await person.see("12–30")

    with NodeThread(SpeakingEntry()) as node:
        looks(look)
