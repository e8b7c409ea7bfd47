"""Real daemons, the real model, real sockets: the oracle's tokens, real clients, credits, and kills."""

from __future__ import annotations

import json
import signal
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import httpx
import openai
import pytest
import trio

from tessella_p2p.base.limits import MICRO_PER_LAYER_POSITION
from tessella_p2p.cli.demo_mesh import Node
from tests.mesh.mesh_thread import MeshThread
from tests.mesh.oracle import Case, cases

MODEL = "smollm2-135m-instruct"
LONG_PROMPT = next(case for case in cases() if case.prompt.startswith("Once upon a time"))
PATIENCE_S = 120.0


async def generate(url: str, prompt_ids: tuple[int, ...], max_tokens: int = 64) -> dict[str, Any]:
    body = {"model": MODEL, "prompt_ids": prompt_ids, "max_tokens": max_tokens, "temperature": 0, "tessella": True}
    async with httpx.AsyncClient(timeout=300.0) as client:
        answer = await client.post(f"{url}/v1/generate", json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


# httpx leaves its own generators to the garbage collector when a streamed answer is left early.
pytestmark = pytest.mark.filterwarnings("ignore:Async generator '(openai|httpx|httpcore):ResourceWarning")


async def until(condition: Callable[[], Any], mesh: MeshThread) -> None:
    """Ask again and again whether ``condition`` (a coroutine function) holds."""
    with trio.fail_after(PATIENCE_S):
        while not await condition():
            for node in mesh.mesh.nodes:
                if node.process is not None and node.process.returncode is None:
                    mesh.mesh.check(node)
            await trio.lowlevel.checkpoint()


async def status(node: Node) -> dict[str, Any]:
    async with httpx.AsyncClient(timeout=30.0) as client:
        found: dict[str, Any] = (await client.get(f"{node.api_url}/status")).json()
    return found


async def micro_credits(node: Node) -> int:
    found = (await status(node))["credits"]
    return int(found["micro_credits"]) if found else 0


def num_layers(found: dict[str, Any]) -> int:
    ((start, end),) = found["layer_ranges"]
    return int(end - start)


async def settled(mesh: MeshThread) -> bool:
    for node in mesh.mesh.workers:
        proofs = (await status(node))["proofs"]
        if proofs["open"] or proofs["pending"]:
            return False
    return True


async def test_the_route_covers_every_layer_once_and_the_answer_is_the_oracles(f32_mesh: MeshThread) -> None:
    case = cases()[0]
    answer = await generate(f32_mesh.mesh.entry_url, case.prompt_ids)
    case.check(answer["tessella"]["token_ids"], answer["finish_reason"])
    assert answer["text"] == "The capital of France is Paris."
    edges = [hop["layers"] for hop in answer["tessella"]["route"]]
    assert [start for start, _ in edges] == [0, *(end for _, end in edges[:-1])]
    assert edges[-1][1] == 30
    assert len({hop["peer_id"] for hop in answer["tessella"]["route"]}) == 3


async def test_all_cases_at_once_on_one_mesh_give_the_oracles_tokens(f32_mesh: MeshThread) -> None:
    answers: dict[int, dict[str, Any]] = {}
    limit = trio.CapacityLimiter(8)

    async def ask(index: int, case: Case) -> None:
        entry = f32_mesh.mesh.workers[index % 3]
        async with limit:
            answers[index] = await generate(entry.api_url, case.prompt_ids)

    async with trio.open_nursery() as nursery:
        for index, case in enumerate(cases()):
            nursery.start_soon(ask, index, case)
    for index, case in enumerate(cases()):
        case.check(answers[index]["tessella"]["token_ids"], answers[index]["finish_reason"])


async def test_every_layer_position_is_paid_once(f32_mesh: MeshThread) -> None:
    await until(lambda: settled(f32_mesh), f32_mesh)
    workers = f32_mesh.mesh.workers
    before = [await micro_credits(node) for node in workers]
    answer = await generate(f32_mesh.mesh.entry_url, LONG_PROMPT.prompt_ids, max_tokens=10)
    positions = len(LONG_PROMPT.prompt_ids) + len(answer["tessella"]["token_ids"]) - 1

    async def all_paid() -> bool:
        found = [await status(node) for node in workers]
        gained = [int(s["credits"]["micro_credits"]) - b for s, b in zip(found, before, strict=True)]
        return gained == [num_layers(s) * positions * MICRO_PER_LAYER_POSITION for s in found]

    await until(all_paid, f32_mesh)


def openai_client(url: str, **options: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, **options)


async def test_the_openai_client_chats_sync_async_and_streamed(f32_mesh: MeshThread) -> None:
    url = f32_mesh.mesh.entry_url
    messages: Any = [{"role": "user", "content": "What is the capital of France?"}]

    def in_sync() -> tuple[Any, list[Any]]:
        with openai_client(url) as client:
            whole = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=20, temperature=0)
            with client.chat.completions.create(
                model=MODEL,
                messages=messages,
                max_tokens=20,
                temperature=0,
                stream=True,
                stream_options={"include_usage": True},
            ) as stream:
                return whole, list(stream)

    whole, chunks = await trio.to_thread.run_sync(in_sync)
    assert whole.choices[0].message.content == "The capital of France is Paris."
    assert whole.choices[0].finish_reason == "stop"
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (37, 7)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == "The capital of France is Paris."
    assert chunks[-1].usage.total_tokens == 44
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0) as client:
        pieces = []
        stream = await client.chat.completions.create(
            model=MODEL, messages=messages, max_tokens=20, temperature=0, stream=True
        )
        async with stream:
            async for chunk in stream:
                pieces += [choice.delta.content or "" for choice in chunk.choices]
        assert "".join(pieces) == text
        models = await client.models.list()
        assert [model.id for model in models.data] == [MODEL]
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(model="other", messages=messages)
        with pytest.raises(openai.BadRequestError):
            await client.chat.completions.create(model=MODEL, messages=messages, max_tokens=-1)
        with pytest.raises(openai.BadRequestError):
            await client.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": "word " * 5000}], max_tokens=5
            )


async def test_a_temperature_with_a_seed_repeats_itself(f32_mesh: MeshThread) -> None:
    body = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 12, "temperature": 1.0, "seed": 7}
    texts = []
    async with httpx.AsyncClient(timeout=300.0) as client:
        for entry, seed in ((0, 7), (1, 7), (0, 8)):
            url = f32_mesh.mesh.workers[entry].api_url
            texts.append((await client.post(f"{url}/v1/generate", json={**body, "seed": seed})).json()["text"])
    assert texts[0] == texts[1]
    assert texts[2] != texts[0]


@asynccontextmanager
async def streaming(url: str, max_tokens: int) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
    """A streamed answer to the long prompt, chunk by chunk."""
    body = {"model": MODEL, "prompt_ids": LONG_PROMPT.prompt_ids, "max_tokens": max_tokens}
    body |= {"stream": True, "tessella": True}
    async with (
        httpx.AsyncClient(timeout=300.0) as client,
        client.stream("POST", f"{url}/v1/generate", json=body) as answer,
    ):
        assert answer.status_code == 200

        async def chunks() -> AsyncGenerator[dict[str, Any], None]:
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    yield json.loads(line.removeprefix("data: "))

        async with aclosing(chunks()) as found:
            yield found


async def test_a_client_that_leaves_frees_the_kv_on_every_stage(f32_mesh: MeshThread) -> None:
    workers = f32_mesh.mesh.workers
    async with streaming(f32_mesh.mesh.entry_url, 1500) as chunks:
        await anext(chunks)
        assert [(await status(node))["queue_depth"] for node in workers] == [1, 1, 1]

    async def all_free() -> bool:
        return [(await status(node))["queue_depth"] for node in workers] == [0, 0, 0]

    await until(all_free, f32_mesh)


async def test_garbage_on_the_p2p_port_ends_that_connection_only(f32_mesh: MeshThread) -> None:
    port = int(f32_mesh.mesh.workers[1].p2p_address.split("/")[4])
    for garbage in (b"GET / HTTP/1.1\r\n\r\n", bytes(range(256)) * 64, b"\x13/multistream/1.0.0\n" + b"\xff" * 4096):
        stream = await trio.open_tcp_stream("127.0.0.1", port)
        async with stream:
            await stream.send_all(garbage)
            with trio.fail_after(PATIENCE_S):
                try:
                    while await stream.receive_some():
                        pass
                except trio.BrokenResourceError:
                    pass
    answer = await generate(f32_mesh.mesh.entry_url, cases()[0].prompt_ids)
    cases()[0].check(answer["tessella"]["token_ids"], answer["finish_reason"])


async def test_a_worker_killed_between_proof_and_upload_is_paid_once(f32_mesh: MeshThread) -> None:
    mesh = f32_mesh.mesh
    await until(lambda: settled(f32_mesh), f32_mesh)
    victim = mesh.workers[1]
    before = await micro_credits(victim)
    layers = num_layers(await status(victim))
    async with streaming(mesh.entry_url, 20) as chunks:
        first = await anext(chunks)
        assert "error" not in first
        await f32_mesh.run(mesh.stop, mesh.orchestrator, signal.SIGKILL)
        last = [chunk async for chunk in chunks][-1]
    positions = len(LONG_PROMPT.prompt_ids) + len(last["tessella"]["token_ids"]) - 1

    async def waits() -> bool:
        return bool((await status(victim))["proofs"]["pending"])

    await until(waits, f32_mesh)
    await f32_mesh.run(mesh.stop, victim, signal.SIGKILL)
    await f32_mesh.run(mesh.restart, mesh.orchestrator)
    await f32_mesh.run(mesh.restart, victim)
    expected = before + layers * positions * MICRO_PER_LAYER_POSITION

    async def is_paid() -> bool:
        return await settled(f32_mesh) and await micro_credits(victim) == expected

    await until(is_paid, f32_mesh)
    await f32_mesh.healthy()
    answer = await generate(mesh.entry_url, cases()[0].prompt_ids)
    cases()[0].check(answer["tessella"]["token_ids"], answer["finish_reason"])


async def test_a_worker_killed_in_mid_session_is_paid_up_to_a_checkpoint(f32_mesh: MeshThread) -> None:
    mesh = f32_mesh.mesh
    await until(lambda: settled(f32_mesh), f32_mesh)
    victim = mesh.workers[1]
    before = await micro_credits(victim)
    layers = num_layers(await status(victim))
    async with streaming(mesh.entry_url, 1500) as chunks:
        await anext(chunks)

        async def has_checkpoint() -> bool:
            return bool((await status(victim))["proofs"]["open"])

        async with trio.open_nursery() as nursery:

            async def read_on() -> None:
                async for _ in chunks:
                    pass

            nursery.start_soon(read_on)
            await until(has_checkpoint, f32_mesh)
            await f32_mesh.run(mesh.stop, victim, signal.SIGKILL)
            nursery.cancel_scope.cancel()
    await f32_mesh.run(mesh.restart, victim)

    async def is_paid() -> bool:
        return await settled(f32_mesh) and await micro_credits(victim) > before

    await until(is_paid, f32_mesh)
    gained = await micro_credits(victim) - before
    assert gained % (layers * MICRO_PER_LAYER_POSITION) == 0
    assert gained // (layers * MICRO_PER_LAYER_POSITION) >= len(LONG_PROMPT.prompt_ids)
    await f32_mesh.healthy()


async def test_without_a_complete_route_the_answer_is_503_with_the_missing_layers(f32_mesh: MeshThread) -> None:
    mesh = f32_mesh.mesh
    ranges = {node.name: (await status(node))["layer_ranges"][0] for node in mesh.workers}
    victim = next(node for node in reversed(mesh.workers[1:]) if ranges[node.name][0] > 0)
    start, end = ranges[victim.name]
    await f32_mesh.run(mesh.stop, victim, signal.SIGTERM)
    url = f"{mesh.entry_url}/v1/chat/completions"
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
    async with httpx.AsyncClient(timeout=60.0) as client:

        async def is_missing() -> bool:
            return (await client.post(url, json=body)).status_code == 503

        await until(is_missing, f32_mesh)
        answer = await client.post(url, json=body)
    assert f"{start}–{end}" in answer.json()["error"]["message"]
    assert answer.json()["error"]["code"] == "no_route"
    assert "retry-after" in answer.headers
    await f32_mesh.run(mesh.restart, victim)
    await f32_mesh.healthy()
