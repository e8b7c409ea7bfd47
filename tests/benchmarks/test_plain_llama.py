"""The plain form computes the same model: what it is fast at must be right."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from benchmarks.plain_llama import PlainLlama
from tests.model.tiny_gguf import tiny_llama, write_tiny_llama
from tests.stages.reference_llama import ReferenceLlama

IDS = [[3, 14, 15, 92, 65, 35], [9, 26, 5, 35, 8, 9]]


def test_prompts_and_single_rows_give_the_logits_of_the_reference(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    model = PlainLlama(write_tiny_llama(tmp_path))
    reference = ReferenceLlama(*tiny_llama())
    model.start(2, len(IDS[0]))
    got = model.forward(torch.tensor([ids[:4] for ids in IDS]))
    for row, ids in zip(got, IDS, strict=True):
        np.testing.assert_allclose(row.numpy(), reference.logits(ids[:4])[-1], atol=1e-4)
    for length in (5, 6):
        got = model.forward(torch.tensor([[ids[length - 1]] for ids in IDS]))
        for row, ids in zip(got, IDS, strict=True):
            np.testing.assert_allclose(row.numpy(), reference.logits(ids[:length])[-1], atol=1e-4)
