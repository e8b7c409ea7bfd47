"""Text of peers and models cannot drive the terminal."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessella_p2p.cli.terminal import printable


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("The capital of France is Paris.\n", "The capital of France is Paris.\n"),
        ("naïve 東京 🗼\tok", "naïve 東京 🗼\tok"),
        ("\x1b]0;title\x07red \x1b[31m", "]0;titlered [31m"),
        ("\x9b2J", "2J"),
        ("over\rwritten\b", "overwritten"),
        ("a\u202eb", "ab"),
    ],
)
def test_escape_sequences_lose_what_makes_them_one(text: str, wanted: str) -> None:
    assert printable(text) == wanted


@given(st.text())
def test_no_control_character_is_left(text: str) -> None:
    assert all(c in "\n\t" or unicodedata.category(c) != "Cc" for c in printable(text))
