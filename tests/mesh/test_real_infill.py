"""Editors' gaps over real daemons: the same text as the manual's route gives, and warm-ups that warm every stage."""

from __future__ import annotations

from typing import Any

import httpx

from tests.bridge import openai_description
from tests.bridge.bridge_doubles import events_of
from tests.mesh.mesh_thread import MeshThread


async def post(mesh: MeshThread, path: str, **body: Any) -> httpx.Response:
    async with httpx.AsyncClient(timeout=120.0) as client:
        answer = await client.post(f"{mesh.mesh.entry_url}{path}", json=body)
    assert answer.status_code == 200, answer.text
    return answer


async def test_editors_get_the_text_of_the_manuals_route(fim_mesh: MeshThread) -> None:
    gap = (await post(fim_mesh, "/v1/fim/completions", prefix="the ", suffix=" in", max_tokens=12)).json()
    whole = (await post(fim_mesh, "/infill", input_prefix="the", prompt=" ", input_suffix=" in", n_predict=12)).json()
    streamed = await post(fim_mesh, "/infill", input_prefix="the ", input_suffix=" in", n_predict=12, stream=True)

    openai_description.check_completion(gap)
    assert whole["content"] == gap["choices"][0]["text"]
    assert "".join(event["content"] for event in events_of(streamed.content)) == whole["content"]
    assert (whole["tokens_evaluated"], whole["tokens_predicted"]) == tuple(
        gap["usage"][name] for name in ("prompt_tokens", "completion_tokens")
    )


async def test_a_warm_up_leaves_the_prompt_in_every_stages_cache(fim_mesh: MeshThread) -> None:
    extra = [{"text": "warm " * 60, "filename": "a.py"}]
    before = "\n\n--- snippet ---\n\n" + extra[0]["text"]
    warm = await post(fim_mesh, "/infill", input_prefix="", input_suffix="", input_extra=extra, n_predict=0)
    asked = await post(fim_mesh, "/v1/fim/completions", prefix=before + "x", suffix="y", max_tokens=2, tessella=True)

    assert (warm.json()["content"], warm.json()["tokens_predicted"]) == ("", 0)
    cached = [hop["cached"] for hop in asked.json()["tessella"]["route"]]
    assert len(cached) == 2
    assert min(cached) >= 192
