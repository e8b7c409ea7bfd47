"""Greedy tokens that an independent implementation (transformers, float32) gave: what the exact recipe has to give."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

DATA = Path(__file__).parents[1] / "data" / "greedy_f32.json"
NEAR_TIE = 0.02
END_TOKEN = 2


@dataclass(frozen=True)
class Case:
    """One prompt and its answer; tokens count up to the first near-tie of the two best logits."""

    kind: str
    prompt: str
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    num_certain: int

    def check(self, token_ids: Sequence[int], finish_reason: str) -> None:
        """Compare an answer of at most 64 tokens, without its end token."""
        expected = self.output_ids[:-1] if self.output_ids[-1] == END_TOKEN else self.output_ids
        certain = min(self.num_certain, len(expected))
        assert tuple(token_ids[:certain]) == expected[:certain], self.prompt
        if self.num_certain >= len(self.output_ids):
            assert len(token_ids) == len(expected)
            assert finish_reason == ("stop" if self.output_ids[-1] == END_TOKEN else "length")


def cases() -> list[Case]:
    """Every case of the oracle."""
    found = []
    for case in json.loads(DATA.read_text())["cases"]:
        gaps = case["gaps"]
        certain = next((i for i, gap in enumerate(gaps) if gap <= NEAR_TIE), len(case["output_ids"]))
        found.append(Case(case["kind"], case["prompt"], tuple(case["prompt_ids"]), tuple(case["output_ids"]), certain))
    return found
