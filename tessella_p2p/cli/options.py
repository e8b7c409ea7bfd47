"""What the commands' options add up to. Imports nothing heavy: the root command needs it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

DEFAULT_API_URL = "http://127.0.0.1:8080"


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """Options before the subcommand, and what the client's file says where they are not given.

    Attributes:
        api_url: a node's HTTP address.
        model_id: the model asked for, or None for the one that the node serves.
        api_key: what the node asks for, or None.
        config_file: the file that ``-c`` names.
    """

    api_url: str
    model_id: str | None
    api_key: str | None = None
    config_file: Path | None = None


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """Options of ``tessella-p2p demo``.

    Attributes:
        prompt: the question.
        prompts: a file with a JSON list of prompts or of ``{"prompt_ids": [...]}``, in place of ``prompt``.
        workers: how many processes share the model.
        recipe: a name in `model.recipe.RECIPES`.
        max_tokens: the longest answer.
        temperature: 0 is greedy.
        parallel: how many of the prompts are asked at the same time.
        json: one JSON document on standard output, and nothing else there.
        keep: stay up afterwards.
        audits: every worker's part is recomputed by another one, and what came of that is shown.
        model: a catalogue id, a GGUF file or its folder.
        model_id: the name under which the mesh serves it.
        models_dir: the folder of pulled models, or None for the default.
    """

    prompt: str
    prompts: Path | None
    workers: int
    recipe: str
    max_tokens: int
    temperature: float
    parallel: int
    json: bool
    keep: bool
    audits: bool
    model: str
    model_id: str
    models_dir: Path | None
