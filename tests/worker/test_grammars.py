"""Grammars at a tail: followed for an honest entry, and no way for any other to harm the stage."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import trio
import trio.testing

from simulations.toy_model import toy_grammars, whole_model_tokens
from tessella_p2p.base.errors import InvalidRequest, Overloaded
from tessella_p2p.base.limits import GRAMMAR_WAIT_S
from tessella_p2p.model.grammar import Constraint, GrammarCompiler
from tessella_p2p.net.virtual_clock import VirtualClock
from tessella_p2p.wire import messages as m
from tessella_p2p.worker.grammars import Grammars
from tests.stages.openings import open_body
from tests.worker.hostile_mesh import PROMPT, eventually, hostile_mesh
from tests.worker.raw_peer import close_frame, ids_step


def lark(text: str) -> m.Sampling:
    return m.Sampling(grammar=m.Grammar(kind="lark", text=text))


SHORT_WORDS = lark("start: /[0-9a-f] /{1000}")


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


def ids(*tokens: int) -> bytes:
    return b"".join(token.to_bytes(4, "little") for token in tokens)


async def test_a_tail_draws_what_the_grammar_allows(tmp_path: Path, clock: VirtualClock) -> None:
    async with hostile_mesh(tmp_path, clock) as mesh:
        hop, body = await mesh.to_head(), mesh.body(sampling=SHORT_WORDS)
        tokens = await mesh.begin(hop, body)
        drawn = await mesh.generate(hop, tokens, body, 6)
        assert all(token < 16 for token in drawn)
        assert drawn == whole_model_tokens(mesh.mesh.model, PROMPT, 6, SHORT_WORDS)
        assert drawn != mesh.expected(6)
        await hop.send(close_frame(body))
        await mesh.is_well()


@pytest.mark.parametrize(
    ("sampling", "answer"),
    [
        (lark("start: ("), ()),
        (m.Sampling(grammar=m.Grammar(kind="json_schema", text='{"type": "nonsense"}')), ()),
        (m.Sampling(grammar=m.Grammar(kind="json_schema", text="{")), ()),
        (SHORT_WORDS, (1, 2, 16)),
    ],
    ids=["no grammar", "no schema", "no JSON", "an answer that does not follow it"],
)
async def test_a_grammar_that_cannot_be_followed_is_the_entrys_fault(
    tmp_path: Path, clock: VirtualClock, sampling: m.Sampling, answer: tuple[int, ...]
) -> None:
    async with hostile_mesh(tmp_path, clock) as mesh:
        hop = await mesh.to_head()
        body = mesh.body(sampling=sampling, history=ids(*answer), history_answer=len(answer))
        await hop.send(mesh.entry.open_frame(body), ids_step(body, 0, PROMPT, sample=True))
        said = await hop.error()
        assert (said.code, said.fault_of) == ("invalid_request", mesh.entry.peer_id)
        assert "the grammar" in said.reason
        await eventually(lambda: mesh.held() == [0, 0, 0])
        await mesh.is_well()


async def test_a_draw_that_nothing_is_left_for_ends_its_session_alone(tmp_path: Path, clock: VirtualClock) -> None:
    async with hostile_mesh(tmp_path, clock) as mesh:
        hop, body, other = await mesh.to_head(), mesh.body(sampling=lark('start: /[0-9] / "no word"')), mesh.body()
        tokens, other_tokens = await mesh.begin(hop, body), await mesh.begin(hop, other)
        (first,) = await mesh.generate(hop, tokens, body, 1)
        await hop.send(ids_step(body, len(PROMPT), [first], sample=True))
        said = await hop.error()
        assert (said.code, said.fault_of) == ("invalid_request", mesh.entry.peer_id)
        assert await mesh.generate(hop, other_tokens, other, 6) == mesh.expected(6)
        await hop.send(close_frame(other))
        await mesh.is_well()


async def test_an_answer_goes_on_behind_what_an_earlier_epoch_brought(tmp_path: Path, clock: VirtualClock) -> None:
    sampling = lark("start: (odd even){500}\nodd: /[13579bdf] /\neven: /[02468ace] /")
    async with hostile_mesh(tmp_path, clock) as mesh:
        expected = whole_model_tokens(mesh.mesh.model, PROMPT, 8, sampling)
        known = expected[:3]
        hop, body = await mesh.to_head(), mesh.body(sampling=sampling, history=ids(*known), history_answer=len(known))
        tokens = await mesh.begin(hop, body, [*PROMPT, *known])
        assert await mesh.generate(hop, tokens, body, 5) == expected[3:]


# ---- the shell ----


class _Gated(GrammarCompiler):
    """Compiles once it is let."""

    def __init__(self) -> None:
        super().__init__([b"a", b""], (), [1], lambda text: [0] * len(text))
        self.began, self.gate, self.most, self.now = threading.Event(), threading.Event(), 0, 0

    def compile(self, grammar: m.Grammar, answer: object = ()) -> Constraint:
        self.now += 1
        self.most = max(self.most, self.now)
        self.began.set()
        self.gate.wait()
        self.now -= 1
        return super().compile(grammar)


GRAMMAR_BODY = open_body(sampling=lark("start: /a*/"))


async def test_the_event_loop_goes_on_while_one_grammar_at_a_time_is_compiled() -> None:
    compiler = _Gated()
    grammars = Grammars(compiler)
    found: list[Constraint | None] = []

    async def ask() -> None:
        found.append(await grammars.constraint_of(GRAMMAR_BODY))

    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(ask)
        await trio.to_thread.run_sync(compiler.began.wait)
        assert found == []
        compiler.gate.set()
    assert len(found) == 3
    assert compiler.most == 1
    assert found[0] is not None
    assert found[0].allowed(2).tolist() == [True, True]


async def test_who_waits_too_long_behind_other_grammars_is_told_so(autojump_clock: trio.testing.MockClock) -> None:
    gate = trio.Event()

    async def slowly(function: object, /) -> Constraint:
        await gate.wait()
        raise AssertionError("nobody lets it")

    grammars = Grammars(toy_grammars(16), slowly)  # type: ignore[arg-type]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(grammars.constraint_of, GRAMMAR_BODY)
        await trio.testing.wait_all_tasks_blocked()
        began = trio.current_time()
        with pytest.raises(Overloaded):
            await grammars.constraint_of(GRAMMAR_BODY)
        assert trio.current_time() == began + GRAMMAR_WAIT_S
        nursery.cancel_scope.cancel()


async def test_without_a_compiler_every_grammar_is_refused_and_nothing_else() -> None:
    assert await Grammars().constraint_of(open_body()) is None
    with pytest.raises(InvalidRequest, match="follows no grammar"):
        await Grammars().constraint_of(GRAMMAR_BODY)
