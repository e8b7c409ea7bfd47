"""Real daemons that serve a small model of every ability: vectors over HTTP against the papers' model, gaps, tools."""

from __future__ import annotations

import base64
from typing import Any

import httpx
import numpy as np
import pytest

from tests.mesh.mesh_thread import MeshThread
from tests.model.fim_artifact import MODEL_ID, text_metadata, tokens
from tests.model.tiny_gguf import tiny_llama
from tests.stages.reference_llama import ReferenceLlama


async def post(mesh: MeshThread, path: str, **body: Any) -> dict[str, Any]:
    async with httpx.AsyncClient(timeout=120.0) as client:
        answer = await client.post(f"{mesh.mesh.entry_url}{path}", json={"model": MODEL_ID, **body})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def papers_vector(ids: list[int]) -> list[float]:
    mean = ReferenceLlama(*tiny_llama(metadata=text_metadata(), vocabulary=len(tokens()))).normed(ids).mean(axis=0)
    return (mean / np.linalg.norm(mean)).tolist()  # type: ignore[no-any-return]


async def test_vectors_are_those_of_the_papers_model(fim_mesh: MeshThread) -> None:
    inputs = [[token % len(tokens()) for token in range(start, start + 150)] for start in (0, 40)]
    as_floats = await post(fim_mesh, "/v1/embeddings", input=inputs, encoding_format="float")
    as_bytes = await post(fim_mesh, "/v1/embeddings", input=inputs, encoding_format="base64")
    for index, ids in enumerate(inputs):
        vector = as_floats["data"][index]["embedding"]
        assert vector == pytest.approx(papers_vector(ids), abs=2e-6)
        raw = base64.b64decode(as_bytes["data"][index]["embedding"])
        assert raw == np.array(vector, "<f4").tobytes()
    assert as_floats["usage"]["prompt_tokens"] == 300


async def test_a_gap_is_framed_by_the_models_tokens(fim_mesh: MeshThread) -> None:
    ids = await post(fim_mesh, "/v1/generate", prompt="<|fim_prefix|>de<|fim_suffix|>on<|fim_middle|>", max_tokens=12)
    gap = await post(fim_mesh, "/v1/fim/completions", prefix="de", suffix="on", max_tokens=12, temperature=0)
    assert gap["choices"][0]["text"] == ids["text"]
    assert gap["usage"]["prompt_tokens"] == 3 + 2
