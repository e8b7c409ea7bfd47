"""langchain-openai: invoke, stream, async, structured output, completions and vectors."""

from __future__ import annotations

import asyncio
import importlib.metadata

from asked import ANSWER, CITY_QUESTION, MODEL, NO_KEY, QUESTION, URL, VECTOR_ELEMENTS, City, check
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings


def main() -> None:
    """Ask."""
    asked = {"base_url": URL, "api_key": NO_KEY, "model": MODEL, "temperature": 0, "max_retries": 0}
    chat = ChatOpenAI(**asked, max_tokens=60)
    answer = chat.invoke(QUESTION)
    check((answer.content, answer.response_metadata["finish_reason"]), (ANSWER, "stop"))
    check(answer.usage_metadata["output_tokens"], 7)
    check("".join(each.content for each in chat.stream(QUESTION)), ANSWER)
    check(asyncio.run(chat.ainvoke(QUESTION)).content, ANSWER)
    city = chat.with_structured_output(City, method="json_schema").invoke(CITY_QUESTION)
    assert isinstance(city, City)
    text = OpenAI(**asked, max_tokens=4)
    check("".join(text.stream("Once upon")), text.invoke("Once upon"))
    # Its own tokenizer would come from the Internet, and is another model's.
    vectors = OpenAIEmbeddings(base_url=URL, api_key=NO_KEY, model=MODEL, check_embedding_ctx_length=False)
    check([len(each) for each in vectors.embed_documents([QUESTION, "Bread"])], [VECTOR_ELEMENTS] * 2)
    print(f"langchain-openai {importlib.metadata.version('langchain-openai')}")


main()
