"""What a check finds (pure)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warning", "problem"]
"""``warning``: the node runs, but not as well as it could; ``problem``: it does not do its work like this."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        subject: what, in a word or two.
        level: how it stands.
        says: what was found.
        fix: what to do about it; empty where nothing is to be done.
    """

    subject: str
    level: Level
    says: str
    fix: str = ""


def ok(subject: str, says: str) -> Finding:
    """All is well."""
    return Finding(subject, "ok", says)


def warning(subject: str, says: str, fix: str) -> Finding:
    """It could be better."""
    return Finding(subject, "warning", says, fix)


def problem(subject: str, says: str, fix: str) -> Finding:
    """It does not work."""
    return Finding(subject, "problem", says, fix)


def has_problem(findings: Iterable[Finding]) -> bool:
    """Whether anything keeps the node from its work."""
    return any(finding.level == "problem" for finding in findings)
