"""instructor in its mode for JSON schemas: whole, and filled in as it is streamed."""

from __future__ import annotations

import importlib.metadata

import instructor
import openai
from asked import CITY_QUESTION, MODEL, NO_KEY, URL, City


def main() -> None:
    """Ask."""
    plain = openai.OpenAI(base_url=URL, api_key=NO_KEY, max_retries=0)
    client = instructor.from_openai(plain, mode=instructor.Mode.JSON_SCHEMA)
    asked = {"model": MODEL, "messages": CITY_QUESTION, "temperature": 0, "max_tokens": 60, "max_retries": 0}
    city = client.chat.completions.create(response_model=City, **asked)
    assert isinstance(city, City)
    partial = list(client.chat.completions.create_partial(response_model=City, **asked))
    assert (partial[-1].name, partial[-1].is_capital) == (city.name, city.is_capital)
    print(f"instructor {importlib.metadata.version('instructor')}")


main()
