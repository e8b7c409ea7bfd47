"""``chat`` and ``fim`` against the real bridge: conversations, modes, pipes, and a real terminal."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from tessella_p2p.base.errors import MalformedMessage
from tessella_p2p.cli.asking import Answer, take
from tessella_p2p.cli.main import cli
from tessella_p2p.cli.timing import show_timing, summary
from tests.bridge.bridge_doubles import ANSWER, MODEL, NO_ROUTE, SpeakingEntry, app_for, serving
from tests.cli.terminal_double import terminal

TEXT = "".join(ANSWER)


async def invoke(url: str, *arguments: str, stdin: str | None = None) -> Result:
    run = partial(CliRunner().invoke, cli, ["-a", url, *arguments], input=stdin)
    return await trio.to_thread.run_sync(run)


def said(entry: SpeakingEntry, asked: int = -1) -> list[tuple[str, str]]:
    messages = entry.asked[asked].messages
    assert messages is not None
    return [(str(message["role"]), str(message["content"])) for message in messages]


# ---- a conversation in a file ----


async def test_a_session_file_has_the_next_call_go_on_with_the_same_messages(tmp_path: Path) -> None:
    entry, session = SpeakingEntry(), tmp_path / "s.json"
    async with serving(app_for(entry)) as url:
        await invoke(url, "chat", "--session-file", str(session), "one")
        await invoke(url, "chat", "--session-file", str(session), "two")
    assert said(entry, 0) == [("user", "one")]
    assert said(entry, 1) == [("user", "one"), ("assistant", TEXT), ("user", "two")]
    assert json.loads(session.read_text())["model"] == MODEL


async def test_an_answer_that_fails_leaves_the_session_as_it_was(tmp_path: Path) -> None:
    session = tmp_path / "s.json"
    async with serving(app_for(SpeakingEntry())) as url:
        await invoke(url, "chat", "--session-file", str(session), "one")
    before = session.read_bytes()
    async with serving(app_for(SpeakingEntry(fail_after=2, failure=NO_ROUTE))) as url:
        result = await invoke(url, "chat", "--session-file", str(session), "two")
    assert (result.exit_code, session.read_bytes()) == (1, before)


async def test_a_system_message_of_the_file_is_kept_at_its_place(tmp_path: Path) -> None:
    entry, session = SpeakingEntry(), tmp_path / "s.json"
    session.write_text('{"version": 1, "messages": [{"role": "system", "content": "Be brief."}]}')
    async with serving(app_for(entry)) as url:
        await invoke(url, "chat", "--session-file", str(session), "-i", stdin="one\n/clear\ntwo\n")
    assert said(entry, 1) == [("system", "Be brief."), ("user", "two")]


# ---- modes and pipes ----


async def test_completion_goes_on_with_the_prompt_as_it_stands() -> None:
    entry = SpeakingEntry()
    async with serving(app_for(entry)) as url:
        result = await invoke(url, "chat", "--mode", "completion", "-m", "3", "Once upon")
    (asked,) = entry.asked
    assert (asked.prompt, asked.messages, asked.max_tokens) == ("Once upon", None, 3)
    assert result.stdout == "The capital of"  # into a pipe goes what the model wrote, to the byte


@pytest.mark.parametrize(
    "arguments", [("fim",), ("chat", "--mode", "fim"), ("chat",)], ids=["fim", "chat --mode fim", "chat"]
)
async def test_what_is_missing_in_a_text_is_asked_by_prefix_and_suffix(arguments: tuple[str, ...]) -> None:
    entry = SpeakingEntry()
    async with serving(app_for(entry)) as url:
        result = await invoke(url, *arguments, "--prefix", "fn main() {", "--suffix", "}")
    (asked,) = entry.asked
    assert asked.gap is not None
    assert (asked.gap.prefix, asked.gap.suffix, asked.max_tokens) == ("fn main() {", "}", 512)
    assert (result.exit_code, result.stdout) == (0, TEXT)


async def test_the_prefix_may_come_on_standard_input() -> None:
    entry = SpeakingEntry()
    async with serving(app_for(entry)) as url:
        await invoke(url, "fim", "--suffix", "}", stdin="fn main() {\n")
    assert entry.asked[0].gap is not None
    assert entry.asked[0].gap.prefix == "fn main() {\n"


async def test_a_dash_among_the_words_is_standard_input() -> None:
    entry = SpeakingEntry()
    async with serving(app_for(entry)) as url:
        await invoke(url, "chat", "Sum this up:", "-", stdin="a report")
    assert said(entry) == [("user", "Sum this up: a report")]


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        (("chat", "--prefix", "a", "words"), "not by a prompt"),
        (("chat", "--mode", "chat", "--prefix", "a"), "for --mode fim"),
        (("chat", "--mode", "completion", "--session-file", "s.json", "a"), "goes with --mode chat"),
        (("chat", "-i", "--mode", "fim", "--prefix", "a"), "asked once"),
        (("chat", "-i", "--json"), "one of them"),
        (("fim",), "around the gap"),
        (("fim", "--prefix", "", "--suffix", ""), "around the gap"),
        (("chat", "caf\udce9"), "no UTF-8"),
        (("chat", "--mode", "sing", "a"), "is not one of"),
    ],
)
async def test_what_does_not_go_together_is_wrong_usage(arguments: tuple[str, ...], rule: str) -> None:
    result = await invoke("http://127.0.0.1:1", *arguments, stdin="")
    assert (result.exit_code, rule in result.stderr) == (2, True)


# ---- times ----


async def test_timing_tells_speed_and_route_beside_the_answer() -> None:
    async with serving(app_for(SpeakingEntry())) as url:
        result = await invoke(url, "chat", "--timing", "hi")
    assert result.stdout == f"{TEXT}\n"
    assert "first token 12 ms · 34.0 tokens/s" in result.stderr
    assert "Standard paid" in result.stderr
    rows = [line.split() for line in result.stderr.splitlines()]
    assert ["12D3KooWHead", "0–12", "1.50", "1.00", "–"] in rows
    assert ["12D3KooWTail", "12–30", "2.50", "2.00", "–"] in rows


def test_cached_positions_are_told_of_those_of_the_prompt(capsys: pytest.CaptureFixture[str]) -> None:
    hop = {"peer_id": "12D3", "layers": [0, 3], "hop_ms": 1.0, "compute_ms": 0.5, "cached": 128}
    show_timing(Answer(usage={"prompt_tokens": 149}, report={"route": [hop]}))
    assert "128 of 149" in capsys.readouterr().err


EVENT_KEYS = [
    *("choices", "delta", "content", "text", "finish_reason", "usage", "tessella", "route", "timings", "peer_id"),
    *("layers", "hop_ms", "cached", "ttft_ms", "tier", "paid", "prompt_tokens", "request_id"),
]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(EVENT_KEYS), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(EVENT_KEYS), JSON, max_size=4))
def test_whatever_a_node_says_is_an_event_or_a_typed_error_and_can_be_shown(event: dict[str, Any]) -> None:
    answer = Answer()
    try:
        take(event, answer)
    except MalformedMessage:
        return
    assert "\x1b" not in summary(answer)
    show_timing(answer)


# ---- interactive ----


async def test_piped_lines_are_questions_of_one_conversation() -> None:
    entry = SpeakingEntry()
    async with serving(app_for(entry)) as url:
        result = await invoke(url, "chat", "-i", "first", stdin="one\n\n /two\n/undo\n/nonsense\n/exit\nnever\n")
    assert (result.exit_code, result.stdout) == (0, f"{TEXT}\n" * 3)
    assert said(entry)[-3:] == [("user", "one"), ("assistant", TEXT), ("user", "/two")]
    assert said(entry)[0] == ("user", "first")
    assert "taken back: /two" in result.stderr
    assert "/nonsense is no command" in result.stderr
    assert len(entry.asked) == 3


async def test_an_error_of_the_node_does_not_end_the_talk(tmp_path: Path) -> None:
    entry = SpeakingEntry(refusal=NO_ROUTE)
    async with serving(app_for(entry)) as url:
        result = await invoke(url, "chat", "-i", stdin="one\ntwo\n")
    assert result.exit_code == 0
    assert result.stderr.count(f"error: {NO_ROUTE}\n") == 2
    assert said(entry) == [("user", "two")]


async def test_a_person_talks_stops_an_answer_edits_and_leaves(tmp_path: Path) -> None:
    entry = SpeakingEntry(hold_after=2)
    environ = {"XDG_STATE_HOME": str(tmp_path / "state"), "TESSELLA_CONFIG_DIR": str(tmp_path)}
    session = tmp_path / "s.json"
    async with serving(app_for(entry)) as url:
        arguments = ("-a", url, "chat", "-i", "--session-file", str(session))
        async with terminal(*arguments, environ=environ) as shown:
            await shown.see("/help lists the commands")
            await shown.see(">")
            await shown.type("what is the capital?\r")
            await shown.see("The capital")
            await shown.type("\x03")
            await shown.see("(stopped)")
            with trio.fail_after(60):
                await entry.closed.wait()
            assert entry.ends == ["cancelled"]
            await shown.see(">")
            entry.hold_after = None
            await shown.type("\x1b[A\x7f, please?\r")  # the question before, with another end
            await shown.see(TEXT)
            await shown.see(">")
            await shown.type("\x04")
            assert await shown.ended() == 0
    assert said(entry) == [
        ("user", "what is the capital?"),
        ("assistant", "The capital"),
        ("user", "what is the capital, please?"),
    ]
    assert json.loads(session.read_text())["messages"][-1]["content"] == TEXT
    history = tmp_path / "state" / "tessella-p2p" / "chat_history"
    assert history.stat().st_mode & 0o777 == 0o600
    assert "what is the capital, please?" in history.read_text()


async def test_ctrl_c_on_a_terminal_ends_a_single_answer_and_keeps_what_was_shown(tmp_path: Path) -> None:
    entry, session = SpeakingEntry(hold_after=2), tmp_path / "s.json"
    async with serving(app_for(entry)) as url:
        arguments = ("-a", url, "chat", "--session-file", str(session), "hi")
        async with terminal(*arguments, environ={"TESSELLA_CONFIG_DIR": str(tmp_path)}) as shown:
            await shown.see("The capital")
            await shown.type("\x03")
            assert await shown.ended() == 130
            with trio.fail_after(60):
                await entry.closed.wait()
    assert entry.ends == ["cancelled"]
    assert json.loads(session.read_text())["messages"][-1] == {"role": "assistant", "content": "The capital"}
