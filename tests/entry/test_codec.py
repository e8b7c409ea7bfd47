"""Encoding a client's text leaves the event loop free, and is bounded by what the model can hold."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
import trio.testing

from tessella_p2p.base.clock import SystemClock
from tessella_p2p.base.errors import InvalidRequest, Overloaded, PromptTooLong
from tessella_p2p.base.limits import GRAMMAR_WAIT_S
from tessella_p2p.entry.api import ModelFeatures
from tessella_p2p.entry.codec import ArtifactCodec
from tessella_p2p.model.artifact import Artifact
from tessella_p2p.model.grammar import GrammarCompiler
from tessella_p2p.wire.messages import Grammar
from tests.mesh.oracle import cases
from tests.model.fim_artifact import CONTEXT_LENGTH, write_fim_artifact


@pytest.fixture(scope="module")
def artifact(smollm2_path: Path) -> Iterator[Artifact]:
    with Artifact.open(smollm2_path) as opened:
        yield opened


async def test_a_conversation_and_a_raw_prompt_give_the_oracles_ids(artifact: Artifact) -> None:
    codec = ArtifactCodec(artifact, SystemClock())
    for case in cases():
        if case.kind == "chat":
            ids = await codec.encode_chat([{"role": "user", "content": case.prompt}])
        else:
            ids = await codec.encode_prompt(case.prompt)
        assert tuple(ids) == case.prompt_ids


async def test_text_is_encoded_on_another_thread(artifact: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []
    encode = type(artifact.tokenizer).encode_prompt

    def watched(*args: object, **options: object) -> list[int]:
        threads.append(threading.current_thread())
        return encode(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(type(artifact.tokenizer), "encode_prompt", watched)
    await ArtifactCodec(artifact, SystemClock()).encode_prompt("text")
    assert threads
    assert threads[0] is not threading.current_thread()


async def test_more_tokens_than_the_model_holds_are_refused(artifact: Artifact) -> None:
    codec = ArtifactCodec(artifact, SystemClock())
    with pytest.raises(PromptTooLong):
        await codec.encode_prompt("word " * 400_000)
    with pytest.raises(PromptTooLong):
        await codec.encode_chat([{"role": "user", "content": "word " * 400_000}])


def test_the_bytes_of_an_answers_tokens_are_its_text(artifact: Artifact) -> None:
    codec = ArtifactCodec(artifact, SystemClock())
    ids = artifact.tokenizer.encode("naïve 🦜", parse_special=False, max_ids=100)
    assert b"".join(map(codec.token_bytes, ids)).decode() == "naïve 🦜"
    assert all(codec.token_bytes(token) == b"" for token in codec.end_ids)


async def test_a_model_says_what_it_can_be_asked_for(artifact: Artifact, tmp_path: Path) -> None:
    codec = ArtifactCodec(artifact, SystemClock())
    assert codec.features == ModelFeatures(False, False, artifact.config.context_length, 576)
    for refused in (codec.encode_gap("a", "b"), codec.encode_chat([{"role": "user", "content": "x"}], [TOOL])):
        with pytest.raises(InvalidRequest):
            await refused
    with Artifact.open(write_fim_artifact(tmp_path)) as other:
        able = ArtifactCodec(other, SystemClock())
        assert able.features == ModelFeatures(True, True, CONTEXT_LENGTH, 64)
        assert await able.encode_gap("a", "b") == other.tokenizer.encode_gap("a", "b")
        told = other.tokenizer.decode(await able.encode_chat([{"role": "user", "content": "x"}], [TOOL]))
    assert '"name": "weather"' in told


TOOL = {"type": "function", "function": {"name": "weather"}}


async def test_a_grammar_is_compiled_on_another_thread_or_refused_with_the_reason(artifact: Artifact) -> None:
    codec = ArtifactCodec(artifact, SystemClock())
    constraint = await codec.check_grammar(Grammar(kind="json_schema", text='{"type": "object"}'))
    (opening,) = artifact.tokenizer.encode("{")
    assert constraint.admits(opening)
    assert not constraint.admits(artifact.tokenizer.encode("x")[0])
    with pytest.raises(InvalidRequest, match="Invalid type: foo"):
        await codec.check_grammar(Grammar(kind="json_schema", text='{"type": "foo"}'))


async def test_a_client_waits_for_other_clients_grammars_only_so_long(
    artifact: Artifact, monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    codec, gate = ArtifactCodec(artifact, SystemClock()), threading.Event()
    monkeypatch.setattr(GrammarCompiler, "compile", lambda *_: gate.wait())
    any_json = Grammar(kind="json_schema", text="{}")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(codec.check_grammar, any_json)
        await trio.testing.wait_all_tasks_blocked()
        began = trio.current_time()
        with pytest.raises(Overloaded):
            await codec.check_grammar(any_json)
        assert trio.current_time() == began + GRAMMAR_WAIT_S
        gate.set()
