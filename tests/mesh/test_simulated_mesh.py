"""The daemons' own roles in one process, under virtual time: routes, tokens, credits, kills."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Literal

import pytest
import trio

from simulations.mesh import MeshShape, SimulatedMesh, SimulatedNode, simulate
from simulations.toy_model import MODEL_ID, ROOT, whole_model_draws
from tessella_p2p.base.errors import InvalidRequest, NoRoute, PromptTooLong, UnknownModel
from tessella_p2p.base.ids import LayerRange, SessionId
from tessella_p2p.base.limits import CHECKPOINT_S, MICRO_PER_LAYER_POSITION
from tessella_p2p.entry.api import Delta, Finished, GenerateRequest, TokenScores
from tessella_p2p.net.virtual_clock import VirtualClock
from tessella_p2p.stages.engine import SessionKey, StepInput, StepOutput
from tessella_p2p.stages.toy import ToyEngine, ToyModel
from tessella_p2p.wire.frames import DType
from tessella_p2p.wire.messages import Grammar, Sampling

PROMPT = list(range(40))


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@asynccontextmanager
async def running_mesh(
    folder: Path, clock: VirtualClock, num_nodes: int = 3, min_stages: int = 3
) -> AsyncIterator[SimulatedMesh]:
    async with simulate(MeshShape(min_stages=min_stages), seed=1, folder=folder, clock=clock) as mesh:
        for _ in range(num_nodes):
            await mesh.start_node(mesh.add_node())
        for node in mesh.nodes:
            await mesh.wait_listed(node)
        yield mesh


async def eventually(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Wait in virtual time."""
    deadline = trio.current_time() + timeout_s
    while not condition():
        assert trio.current_time() < deadline, "it did not become true"
        with trio.move_on_after(0.1):
            await trio.Event().wait()


def balance(mesh: SimulatedMesh, node: SimulatedNode) -> int:
    return mesh.store.account(node.peer_id).micro_credits


def all_settled(mesh: SimulatedMesh) -> bool:
    counts = [node.proof_log.counts() for node in mesh.nodes if node.proof_log is not None]
    return all(count.open == 0 and count.pending == 0 for count in counts)


def held_sessions(mesh: SimulatedMesh) -> int:
    stages = [
        node.roles.worker.stage for node in mesh.nodes if node.roles is not None and node.roles.worker is not None
    ]
    return sum(stage.num_sessions for stage in stages if stage is not None)


def layers_of(mesh: SimulatedMesh, node: SimulatedNode) -> int:
    assert node.roles is not None
    assert node.roles.worker is not None
    assert node.roles.worker.assignment is not None
    return len(node.roles.worker.assignment.layers)


@pytest.mark.parametrize("num_nodes", [1, 2, 3, 5])
async def test_any_number_of_stages_answers_as_the_whole_model_does(
    tmp_path: Path, clock: VirtualClock, num_nodes: int
) -> None:
    async with running_mesh(tmp_path, clock, num_nodes, min_stages=num_nodes) as mesh:
        finished = await mesh.ask(mesh.nodes[-1], PROMPT, 20)
        assert finished.token_ids == mesh.expected(PROMPT, 20)
        edges = [hop.layers.as_tuple() for hop in finished.route]
        assert len(edges) == num_nodes
        assert [start for start, _ in edges] == [0, *(end for _, end in edges[:-1])]
        assert edges[-1][1] == mesh.shape.layers
        assert finished.paid


async def test_eight_sessions_at_once_answer_as_alone(tmp_path: Path, clock: VirtualClock) -> None:
    async with running_mesh(tmp_path, clock) as mesh:
        answers: dict[int, Finished] = {}

        async def ask(index: int) -> None:
            answers[index] = await mesh.ask(mesh.nodes[index % 3], [index, *PROMPT], 12)

        async with trio.open_nursery() as nursery:
            for index in range(8):
                nursery.start_soon(ask, index)
        for index, finished in answers.items():
            assert finished.token_ids == mesh.expected([index, *PROMPT], 12)


async def test_every_layer_position_is_paid_once_and_the_books_balance(tmp_path: Path, clock: VirtualClock) -> None:
    async with running_mesh(tmp_path, clock) as mesh:
        await mesh.ask(mesh.nodes[0], PROMPT, 20)
        await eventually(lambda: all_settled(mesh) and all(balance(mesh, node) for node in mesh.nodes))
        positions = len(PROMPT) + 19  # the last sampled token is not computed
        for node in mesh.nodes:
            assert balance(mesh, node) == layers_of(mesh, node) * positions * MICRO_PER_LAYER_POSITION
        earned = sum(balance(mesh, node) for node in mesh.nodes)
        assert earned == mesh.shape.layers * positions * MICRO_PER_LAYER_POSITION
        assert mesh.store.total() == 0


async def test_leaving_an_answer_frees_its_kv_on_every_stage(tmp_path: Path, clock: VirtualClock) -> None:
    async with running_mesh(tmp_path, clock) as mesh:
        roles = mesh.nodes[0].roles
        assert roles is not None
        request = GenerateRequest(model=MODEL_ID, prompt_ids=PROMPT, max_tokens=500)
        async with roles.entry.generate(request) as generation, aclosing(generation.events()) as events:
            async for event in events:
                assert isinstance(event, Delta)
                assert held_sessions(mesh) == 3
                break
        await eventually(lambda: held_sessions(mesh) == 0, timeout_s=2.0)
        await eventually(lambda: all_settled(mesh))
        assert balance(mesh, mesh.nodes[2]) > 0


FEW = tuple((token, 100.0) for token in (3, 5, 8, 13, 21, 34))
"""Biased so far up that all others are left out: tokens come back, and penalties decide."""
KINDS_OF_DRAWS: dict[str, Sampling] = {
    "greedy": Sampling(),
    "presence and frequency": Sampling(presence_penalty=1.5, frequency_penalty=0.4, logit_bias=FEW),
    "everything": Sampling(
        temperature=1.2,
        top_k=5,
        top_p=0.95,
        min_p=0.01,
        frequency_penalty=0.3,
        repetition_penalty=1.02,
        logit_bias=FEW,
        seed=2**64 - 1,
        num_top=3,
    ),
    "a grammar": Sampling(
        temperature=1.0,
        grammar=Grammar(
            kind="lark",
            text="start: (odd even){500}\nodd: /[0-9a-f]*[13579bdf] /\neven: /[0-9a-f]*[02468ace] /",
        ),
    ),
}


@pytest.mark.parametrize("params", KINDS_OF_DRAWS.values(), ids=KINDS_OF_DRAWS)
async def test_a_stage_that_dies_is_replaced_and_the_draws_are_the_same(
    tmp_path: Path, clock: VirtualClock, params: Sampling
) -> None:
    async with running_mesh(tmp_path, clock, num_nodes=6) as mesh:
        await eventually(
            lambda: all(node.roles and node.roles.worker and node.roles.worker.stage for node in mesh.nodes)
        )
        await eventually(lambda: len(ready_peers(mesh)) == 6)
        entry = mesh.nodes[0]
        victims = await draws_until_kill(mesh, entry, params, 30, kill_after=8)
        assert victims is not None


def ready_peers(mesh: SimulatedMesh) -> Sequence[object]:
    roles = mesh.nodes[0].roles
    assert roles is not None
    return roles.discovery.view.stages(ROOT, None, mesh.date().unix_ms())


async def draws_until_kill(
    mesh: SimulatedMesh, entry: SimulatedNode, params: Sampling, max_tokens: int, kill_after: int
) -> SimulatedNode:
    """Kill a stage of the route in mid-answer; the answer has to be the whole model's all the same."""
    roles = entry.roles
    assert roles is not None
    victim: SimulatedNode | None = None
    tokens: list[int] = []
    scores: list[TokenScores] = []
    fields = params.model_dump()
    num_top = fields.pop("num_top")
    fields["grammar"] = params.grammar
    request = GenerateRequest(
        model=MODEL_ID,
        prompt_ids=PROMPT,
        max_tokens=max_tokens,
        logprobs=num_top > 0,
        top_logprobs=num_top,
        **fields,
    )
    async with roles.entry.generate(request) as generation, aclosing(generation.events()) as events:
        async for event in events:
            if isinstance(event, Delta):
                tokens += event.token_ids
                scores += event.scores
                if len(tokens) == kill_after:
                    busy = [
                        node
                        for node in mesh.nodes
                        if node is not entry
                        and node.roles
                        and node.roles.worker
                        and node.roles.worker.hops.open_sessions
                    ]
                    victim = busy[0]
                    mesh.crash_node(victim)
            else:
                assert event.token_ids == tuple(tokens)
    truth = whole_model_draws(mesh.model, PROMPT, max_tokens, params)
    assert tokens == [each.token_id for each in truth]
    assert len(scores) == (max_tokens if num_top else 0)
    for told, true in zip(scores, truth, strict=False):
        assert told.chosen.logprob == pytest.approx(true.logprob, abs=1e-5)
        assert [each.token_id for each in told.top] == [each.token_id for each in true.top]
    assert victim is not None
    return victim


async def test_a_stage_killed_in_mid_session_is_paid_up_to_its_last_checkpoint(
    tmp_path: Path, clock: VirtualClock
) -> None:
    async with running_mesh(tmp_path, clock, num_nodes=3) as mesh:
        entry, roles = mesh.nodes[0], mesh.nodes[0].roles
        assert roles is not None
        victim = next(node for node in mesh.nodes if node is not entry and not is_tail(mesh, node))
        request = GenerateRequest(model=MODEL_ID, prompt_ids=PROMPT, max_tokens=200)
        began = trio.current_time()

        async def ask_and_kill() -> None:
            async with roles.entry.generate(request) as generation, aclosing(generation.events()) as events:
                async for _ in events:
                    if victim.roles is not None and trio.current_time() - began > 3 * CHECKPOINT_S:
                        mesh.crash_node(victim)

        with pytest.raises(NoRoute):
            await ask_and_kill()
        layers = mesh.shape.layers // 3
        await mesh.start_node(victim)
        await eventually(lambda: balance(mesh, victim) > 0)
        paid = balance(mesh, victim) // (layers * MICRO_PER_LAYER_POSITION)
        assert len(PROMPT) < paid < len(PROMPT) + 200
        await eventually(lambda: all_settled(mesh))
        assert mesh.store.total() == 0


def is_tail(mesh: SimulatedMesh, node: SimulatedNode) -> bool:
    assert node.roles is not None
    assert node.roles.worker is not None
    assert node.roles.worker.assignment is not None
    return node.roles.worker.assignment.layers.end == mesh.shape.layers


async def test_a_node_killed_between_proof_and_upload_is_paid_once(tmp_path: Path, clock: VirtualClock) -> None:
    async with running_mesh(tmp_path, clock) as mesh:
        entry, victim = mesh.nodes[0], mesh.nodes[1]
        roles = entry.roles
        assert roles is not None
        request = GenerateRequest(model=MODEL_ID, prompt_ids=PROMPT, max_tokens=20)
        async with roles.entry.generate(request) as generation, aclosing(generation.events()) as events:
            async for event in events:
                if isinstance(event, Delta) and mesh.orchestrator is not None:
                    mesh.crash_orchestrator()  # so that no proof can be uploaded
        assert victim.roles is not None
        await eventually(lambda: victim.proof_log is not None and victim.proof_log.counts().pending == 1)
        assert balance(mesh, victim) == 0
        mesh.crash_node(victim)
        await mesh.start_orchestrator()
        await mesh.start_node(victim)
        expected = mesh.shape.layers // 3 * (len(PROMPT) + 19) * MICRO_PER_LAYER_POSITION
        await eventually(lambda: all(balance(mesh, node) == expected for node in mesh.nodes), timeout_s=120.0)
        await eventually(lambda: all_settled(mesh))
        assert balance(mesh, victim) == expected
        assert mesh.store.total() == 0


async def test_an_answer_outlives_the_orchestrator_and_its_proofs_settle_later(
    tmp_path: Path, clock: VirtualClock
) -> None:
    async with running_mesh(tmp_path, clock) as mesh:
        roles = mesh.nodes[0].roles
        assert roles is not None
        tokens: list[int] = []
        request = GenerateRequest(model=MODEL_ID, prompt_ids=PROMPT, max_tokens=40)
        async with roles.entry.generate(request) as generation, aclosing(generation.events()) as events:
            async for event in events:
                if isinstance(event, Delta):
                    tokens += event.token_ids
                    if len(tokens) == 5:
                        mesh.crash_orchestrator()
        assert tuple(tokens) == mesh.expected(PROMPT, 40)
        unpaid = await mesh.ask(mesh.nodes[1], PROMPT, 5)
        assert unpaid.token_ids == mesh.expected(PROMPT, 5)
        assert not unpaid.paid
        assert all(balance(mesh, node) == 0 for node in mesh.nodes)
        await mesh.start_orchestrator()
        expected = mesh.shape.layers // 3 * (len(PROMPT) + 39) * MICRO_PER_LAYER_POSITION
        await eventually(lambda: all(balance(mesh, node) == expected for node in mesh.nodes), timeout_s=120.0)


async def test_bad_requests_are_refused_before_any_peer_works(tmp_path: Path, clock: VirtualClock) -> None:
    async with running_mesh(tmp_path, clock) as mesh:
        roles = mesh.nodes[0].roles
        assert roles is not None
        refused: list[tuple[GenerateRequest, type[Exception]]] = [
            (GenerateRequest(model="other", prompt="a"), UnknownModel),
            (GenerateRequest(model=MODEL_ID), InvalidRequest),
            (GenerateRequest(model=MODEL_ID, prompt="a", prompt_ids=[1]), InvalidRequest),
            (GenerateRequest(model=MODEL_ID, prompt_ids=[]), InvalidRequest),
            (GenerateRequest(model=MODEL_ID, prompt_ids=[5000]), InvalidRequest),
            (GenerateRequest(model=MODEL_ID, prompt_ids=[-1]), InvalidRequest),
            (GenerateRequest(model=MODEL_ID, prompt="a", max_tokens=-1), InvalidRequest),
            (GenerateRequest(model=MODEL_ID, prompt="a" * 5000), PromptTooLong),
            (GenerateRequest(model=MODEL_ID, prompt="a", seed=-1), InvalidRequest),
        ]
        for request, error in refused:
            with pytest.raises(error):
                async with roles.entry.generate(request):
                    pass
        assert held_sessions(mesh) == 0
        assert all(
            node.roles and node.roles.worker and node.roles.worker.hops.sessions_served == 0 for node in mesh.nodes
        )


async def test_without_a_route_the_missing_layers_are_named(tmp_path: Path, clock: VirtualClock) -> None:
    async with running_mesh(tmp_path, clock) as mesh:
        tail = next(node for node in mesh.nodes if is_tail(mesh, node))
        entry = next(node for node in mesh.nodes if node is not tail)
        mesh.crash_node(tail)
        roles = entry.roles
        assert roles is not None
        await eventually(lambda: not roles.entry.model_ids())
        with pytest.raises(NoRoute) as caught:
            await mesh.ask(entry, PROMPT, 5)
        assert caught.value.missing == ((8, 12),)


def toy_rows(layers: int, ids: Sequence[int]) -> list[bytes]:
    """Every row between two layers of the toy, for ``ids`` at their positions."""
    model, rows = ToyModel(layers), []
    for cut in range(1, layers):
        engine = ToyEngine(model, LayerRange(0, cut))
        key = SessionKey(SessionId(bytes(16)), 0)
        engine.open_session(key, len(ids))
        body = b"".join(token.to_bytes(4, "little") for token in ids)
        (answer,) = engine.forward([StepInput(key, 0, len(ids), DType.U32, body)])
        assert isinstance(answer, StepOutput)
        width = engine.hidden_size * 4
        rows += [bytes(answer.body[at : at + width]) for at in range(0, len(answer.body), width)]
    return rows


async def test_the_orchestrator_receives_no_token_no_tensor_and_no_unkeyed_digest(
    tmp_path: Path, clock: VirtualClock
) -> None:
    shape = MeshShape(record=True)
    async with simulate(shape, seed=1, folder=tmp_path, clock=clock) as mesh:
        for _ in range(3):
            await mesh.start_node(mesh.add_node())
        await mesh.wait_listed(mesh.nodes[0])
        prompt = [977, 3, 641, 12, 809, 333, 54, 721] * 5
        finished = await mesh.ask(mesh.nodes[0], prompt, 20)
        await eventually(lambda: all_settled(mesh) and balance(mesh, mesh.nodes[0]) > 0)
        received = b"".join(mesh.orchestrator_received)
        assert finished.request_id.encode() in received, "the recording is of this request"
        ids = [*prompt, *finished.token_ids]
        assert not leaks(received, ids, toy_rows(shape.layers, ids))


def leaks(received: bytes, ids: Sequence[int], rows: Sequence[bytes]) -> list[str]:
    """What of a conversation can be found in bytes: neighbouring tokens in any width, rows, and plain digests of either."""
    found = []
    orders: tuple[Literal["little", "big"], ...] = ("little", "big")
    for order in orders:
        for width in (2, 4, 8):
            words = [token.to_bytes(width, order) for token in ids]
            found += [f"tokens at {at}" for at in range(len(ids) - 1) if words[at] + words[at + 1] in received]
    texts = [b"".join(token.to_bytes(4, "little") for token in ids[:end]) for end in range(1, len(ids) + 1)]
    for kind, pieces in (("row", rows), ("token ids", texts)):
        for index, piece in enumerate(pieces):
            plain = (piece, hashlib.sha256(piece).digest(), hashlib.blake2b(piece, digest_size=32).digest())
            found += [f"{kind} {index}" for form in plain if form in received and len(form) > 4]
    return found


def test_the_leak_scan_finds_what_is_there() -> None:
    ids, row = [977, 3, 641], b"r" * 32
    assert leaks(b"x" + b"".join(token.to_bytes(4, "little") for token in ids), ids, [])
    assert leaks(b"x" + row + b"y", ids, [row])
    assert leaks(hashlib.sha256(row).digest(), ids, [row])
    assert leaks(hashlib.blake2b((977).to_bytes(4, "little"), digest_size=32).digest(), ids, [])
    assert not leaks(b"nothing of it", ids, [row])
