"""What every client of the matrix is told, and asks."""

from __future__ import annotations

import os
from typing import Literal

from pydantic import BaseModel

URL = os.environ["CLIENT_URL"]
"""Ends in ``/v1``; no key is asked for."""
MODEL = os.environ["CLIENT_MODEL"]
NO_KEY = "unused"
QUESTION = "What is the capital of France?"
MESSAGES = [{"role": "user", "content": QUESTION}]
ANSWER = "The capital of France is Paris."
VECTOR_ELEMENTS = 576


class City(BaseModel):
    """What is asked for as JSON."""

    name: Literal["Paris", "London", "Rome"]
    is_capital: bool


CITY_QUESTION = [{"role": "user", "content": "Is Paris a capital? Answer in JSON."}]


def check(found: object, wanted: object) -> None:
    """Fail, and say what came."""
    if found != wanted:
        raise AssertionError(f"wanted {wanted!r}, and {found!r} came")
