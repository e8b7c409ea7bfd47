"""Programs that people already use, against a mesh of real processes with the real model.

Each client is a script of its own in ``python`` or ``javascript``. What this package installs for its tests (openai for Python) and
curl run everywhere; the others where ``make clients`` has installed them.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import httpx
import pytest
import trio

from tests.mesh.mesh_thread import MeshThread

HERE = Path(__file__).parent
CLIENTS_PYTHON = HERE.parents[1] / ".venv-clients" / "bin" / "python"
PYTHON_CLIENTS = ("openai", "llm", "litellm", "langchain", "instructor", "llama_index")
NODE_CLIENTS = ("openai", "ai_sdk")
PATIENCE_S = 120.0


def run_client(command: Sequence[str | Path], told: Mapping[str, str]) -> str:
    """What it prints; it fails as the client does."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("OPENAI_", "PYTEST_"))}
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=PATIENCE_S, env={**environment, **told}
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def script(name: str) -> Path:
    return HERE / "python" / f"ask_{name}.py"


def test_openai_for_python(told: Mapping[str, str]) -> None:
    print(run_client([sys.executable, script("openai")], told))


@pytest.mark.skipif(not CLIENTS_PYTHON.exists(), reason="`make clients` installs it")
@pytest.mark.parametrize("name", PYTHON_CLIENTS)
def test_a_python_client(name: str, told: Mapping[str, str]) -> None:
    print(run_client([CLIENTS_PYTHON, script(name)], told))


@pytest.mark.skipif(not (HERE / "javascript" / "node_modules").exists(), reason="`make clients` installs it")
@pytest.mark.parametrize("name", NODE_CLIENTS)
def test_a_node_client(name: str, told: Mapping[str, str]) -> None:
    print(run_client(["node", HERE / "javascript" / f"ask_{name}.mjs"], told))


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
def test_curl(told: Mapping[str, str]) -> None:
    body = {
        "model": told["CLIENT_MODEL"],
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "max_tokens": 24,
    }

    def curl(*arguments: str, **changed: object) -> str:
        sent = ["--json", json.dumps({**body, **changed})]
        return run_client(["curl", "--silent", "--show-error", *arguments, *sent], told)

    url = f"{told['CLIENT_URL']}/chat/completions"
    assert json.loads(curl(url))["choices"][0]["message"]["content"] == "The capital of France is Paris."
    events = [line.removeprefix("data: ") for line in curl("--no-buffer", url, stream=True).splitlines() if line]
    assert events.pop() == "[DONE]"
    text = "".join(json.loads(each)["choices"][0]["delta"].get("content", "") for each in events)
    assert text == "The capital of France is Paris."
    refused = curl("--write-out", "\n%{http_code} %{content_type}", url, model="other").splitlines()
    assert json.loads(refused[0])["error"]["code"] == "model_not_found"
    assert refused[1] == "404 application/json"
    assert "401" in curl("--output", os.devnull, "--write-out", "%{http_code}", f"{told['CLIENT_KEYED_URL']}/models")


async def test_openai_for_python_hears_that_layers_are_missing(
    client_mesh: MeshThread, told: Mapping[str, str]
) -> None:
    """The last one: the mesh does not serve afterwards."""
    for worker in client_mesh.mesh.workers[1:]:
        await client_mesh.run(client_mesh.mesh.stop, worker, signal.SIGTERM)
    async with httpx.AsyncClient(timeout=60.0) as client:
        with trio.fail_after(PATIENCE_S):
            while (await client.get(f"{told['CLIENT_URL']}/models")).json()["data"]:
                await trio.lowlevel.checkpoint()
    print(run_client([sys.executable, script("openai")], {**told, "CLIENT_NO_ROUTE": "1"}))
