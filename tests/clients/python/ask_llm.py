"""llm, as its own command line: streamed, whole, with a schema, and from a pipe."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from asked import ANSWER, MODEL, QUESTION, URL, City, check


def run(folder: str, *arguments: str, given: str = "") -> str:
    """What ``llm`` prints."""
    command = [sys.executable, "-m", "llm", *arguments]
    environment = {**os.environ, "LLM_USER_PATH": folder}
    done = subprocess.run(command, input=given, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise AssertionError(done.stderr)
    return done.stdout.strip()


def main() -> None:
    """Set it up as its manual says, and ask."""
    with tempfile.TemporaryDirectory() as folder:
        model = {"model_id": "mesh", "model_name": MODEL, "api_base": URL, "supports_schema": True}
        # A JSON document is YAML.
        Path(folder, "extra-openai-models.yaml").write_text(json.dumps([model]), encoding="utf-8")
        asked = ("-m", "mesh", "--key", "unused", "-o", "temperature", "0", "-o", "max_tokens", "60")
        check(run(folder, *asked, QUESTION), ANSWER)
        check(run(folder, *asked, "--no-stream", QUESTION), ANSWER)
        check(run(folder, *asked, given=QUESTION), ANSWER)
        schema = json.dumps(City.model_json_schema())
        City.model_validate_json(run(folder, *asked, "--no-stream", "--schema", schema, "Is Paris a capital?"))
    print(f"llm {importlib.metadata.version('llm')}")


main()
