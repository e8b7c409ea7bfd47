"""litellm: whole, streamed with usage, completions, vectors, and its own classes of errors."""

from __future__ import annotations

import importlib.metadata
import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks the Internet as it is imported

import litellm
from asked import ANSWER, MESSAGES, MODEL, NO_KEY, QUESTION, URL, VECTOR_ELEMENTS, check

ASKED = {"api_base": URL, "api_key": NO_KEY, "temperature": 0, "max_tokens": 24, "num_retries": 0}


def main() -> None:
    """Ask."""
    whole = litellm.completion(model=f"openai/{MODEL}", messages=MESSAGES, **ASKED)
    check((whole.choices[0].message.content, whole.choices[0].finish_reason), (ANSWER, "stop"))
    chunks = list(
        litellm.completion(
            model=f"openai/{MODEL}", messages=MESSAGES, stream=True, stream_options={"include_usage": True}, **ASKED
        )
    )
    rebuilt = litellm.stream_chunk_builder(chunks)
    check((rebuilt.choices[0].message.content, rebuilt.choices[0].finish_reason), (ANSWER, "stop"))
    check(rebuilt.usage.completion_tokens, whole.usage.completion_tokens)
    text = litellm.text_completion(model=f"text-completion-openai/{MODEL}", prompt="Once upon", **ASKED)
    assert text.choices[0].text
    vectors = litellm.embedding(model=f"openai/{MODEL}", input=[QUESTION], api_base=URL, api_key=NO_KEY)
    check(len(vectors.data[0]["embedding"]), VECTOR_ELEMENTS)
    for kind, changed in (
        (litellm.exceptions.NotFoundError, {"model": "openai/other"}),
        (litellm.exceptions.BadRequestError, {"model": f"openai/{MODEL}", "max_tokens": -1}),
    ):
        try:
            litellm.completion(**{"messages": MESSAGES, **ASKED, **changed})
        except kind:
            continue
        raise AssertionError(f"{changed} was answered")
    print(f"litellm {importlib.metadata.version('litellm')}")


main()
