"""What others wrote, made safe to print: text of peers and models never moves the cursor or sets a title."""

from __future__ import annotations

import json
import sys
import unicodedata

import click

_KEPT = "\n\t"
_UNPRINTABLE = ("Cc", "Cs")
_BIDI = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
"""Overrides of the writing direction: they make text read as something else."""


def printable(text: str) -> str:
    """``text`` without control characters (escape sequences need one), direction overrides, and halves of surrogate pairs."""
    return "".join(c for c in text if c in _KEPT or (unicodedata.category(c) not in _UNPRINTABLE and c not in _BIDI))


def print_json(value: object) -> None:
    """One JSON document on standard output; JSON escapes control characters itself."""
    click.echo(json.dumps(value, ensure_ascii=False))


def write_text(text: str) -> None:
    """Text of a model on standard output, at once; as it is where no terminal reads it."""
    click.echo(printable(text) if sys.stdout.isatty() else text, nl=False)
