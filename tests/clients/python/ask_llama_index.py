"""llama-index-llms-openai-like: chat and text, whole and streamed."""

from __future__ import annotations

import importlib.metadata

from asked import ANSWER, MODEL, NO_KEY, QUESTION, URL, check
from llama_index.core.base.llms.types import ChatMessage
from llama_index.llms.openai_like import OpenAILike


def main() -> None:
    """Ask."""
    asked = {
        "model": MODEL,
        "api_base": URL,
        "api_key": NO_KEY,
        "temperature": 0,
        "max_retries": 0,
        "context_window": 2048,
    }
    chat = OpenAILike(**asked, max_tokens=24, is_chat_model=True)
    question = [ChatMessage(role="user", content=QUESTION)]
    check(chat.chat(question).message.content, ANSWER)
    check("".join(each.delta or "" for each in chat.stream_chat(question)), ANSWER)
    check(chat.complete(QUESTION).text, ANSWER)
    text = OpenAILike(**asked, max_tokens=4, is_chat_model=False)
    check("".join(each.delta or "" for each in text.stream_complete("Once upon")), text.complete("Once upon").text)
    print(f"llama-index-llms-openai-like {importlib.metadata.version('llama-index-llms-openai-like')}")


main()
