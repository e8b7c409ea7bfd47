"""A whole model in a process of its own with one compute thread, driven directly: no network, no queues.

``python -m benchmarks.engine_process MODEL FORM`` with a recipe's name as the form, or ``plain`` for `plain_llama`. It answers lines of
JSON (see `json_lines`): ``prefill`` and ``decode`` with the seconds that they took, ``limits`` with what this core can do.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from benchmarks.json_lines import serve
from benchmarks.token_runs import prompts
from tessella_p2p.base.errors import TessellaError
from tessella_p2p.base.ids import SessionId
from tessella_p2p.base.limits import DEFAULT_MAX_POSITIONS
from tessella_p2p.model.config import ModelConfig
from tessella_p2p.model.gguf import GgufFile
from tessella_p2p.model.recipe import recipe_named
from tessella_p2p.stages.engine import Sampled, SessionKey, StageEngine, StepInput
from tessella_p2p.stages.loading import load_engine
from tessella_p2p.stages.sampler import Sampler
from tessella_p2p.wire.frames import DType
from tessella_p2p.wire.messages import Sampling

PLAIN = "plain"
_REPEATS = 4
_BANDWIDTH_FLOATS = 1 << 26
_MATRIX = 1536


class Form(Protocol):
    """One way to compute the model."""

    def start(self, sequences: int, positions: int) -> None:
        """Forget everything; room for so many sequences."""
        ...

    def step(self, token_ids: Sequence[Sequence[int]]) -> list[int]:
        """The next positions of every sequence, the same number for each; the likeliest token behind each."""
        ...


class EngineForm:
    """A recipe of ours, through the port that a stage uses; sampling (greedy) included."""

    def __init__(self, engine: StageEngine) -> None:
        self._engine = engine
        self._keys: list[SessionKey] = []
        self._sampler = Sampler(Sampling())
        self._opened = 0
        self._position = 0

    def start(self, sequences: int, positions: int) -> None:
        """See `Form.start`."""
        for key in self._keys:
            self._engine.close_session(key)
        self._keys = [SessionKey(SessionId((self._opened + n).to_bytes(16, "big")), 0) for n in range(sequences)]
        self._opened += sequences
        self._position = 0
        for key in self._keys:
            self._engine.open_session(key, positions)

    def step(self, token_ids: Sequence[Sequence[int]]) -> list[int]:
        """See `Form.step`."""
        rows = len(token_ids[0])
        steps = [
            StepInput(key, self._position, rows, DType.U32, np.array(ids, "<u4").tobytes(), self._sampler)
            for key, ids in zip(self._keys, token_ids, strict=True)
        ]
        self._position += rows
        return [_token(answer) for answer in self._engine.forward(steps)]


def _token(answer: object) -> int:
    if isinstance(answer, TessellaError):
        raise answer
    assert isinstance(answer, Sampled)
    return answer.token_id


class PlainForm:
    """`plain_llama`, greedy."""

    def __init__(self, path: Path) -> None:
        import torch

        from benchmarks.plain_llama import PlainLlama

        torch.set_num_threads(1)
        self._model = PlainLlama(path)

    def start(self, sequences: int, positions: int) -> None:
        """See `Form.start`."""
        self._model.start(sequences, positions)

    def step(self, token_ids: Sequence[Sequence[int]]) -> list[int]:
        """See `Form.step`."""
        import torch

        chosen: list[int] = self._model.forward(torch.tensor(token_ids)).argmax(-1).tolist()
        return chosen


def prefill(form: Form, tokens: int, seed: int) -> dict[str, object]:
    """Seconds from a prompt to its first token."""
    form.start(1, tokens)
    prompt = prompts(1, tokens, seed)
    start = time.perf_counter()
    form.step(prompt)
    return {"seconds": time.perf_counter() - start}


def decode(form: Form, sequences: int, prompt: int, tokens: int, seed: int) -> dict[str, object]:
    """Seconds for ``tokens`` further tokens of each of ``sequences``, after prompts that are not counted."""
    form.start(sequences, prompt + tokens)
    last = form.step(prompts(sequences, prompt, seed))
    start = time.perf_counter()
    for _ in range(tokens):
        last = form.step([[token] for token in last])
    return {"seconds": time.perf_counter() - start}


def limits(path: Path) -> dict[str, object]:
    """What one thread of this machine can do at best now, and what the model asks of it."""
    import torch

    torch.set_num_threads(1)
    numbers, square = torch.ones(_BANDWIDTH_FLOATS), torch.rand(_MATRIX, _MATRIX)
    with GgufFile.open(path) as file:
        config = ModelConfig.from_gguf(file)
        layers = [file.tensors[name] for layer in config.all_layers for name in config.layer_shapes(layer)]
        head = file.tensors[config.output_name]
    return {
        "bytes_s": numbers.nbytes / _best_s(numbers.sum),
        "flop_s": 2 * _MATRIX**3 / _best_s(lambda: square @ square),
        "weight_bytes": sum(tensor.size_bytes for tensor in [*layers, head]),
        "layer_flop": 2 * sum(int(np.prod(tensor.shape)) for tensor in layers if len(tensor.shape) == 2),
        "head_flop": 2 * int(np.prod(head.shape)),
    }


def _best_s(work: Callable[[], object]) -> float:
    times = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def _form(path: Path, name: str) -> Form:
    if name == PLAIN:
        return PlainForm(path)
    with GgufFile.open(path) as file:
        layers = ModelConfig.from_gguf(file).all_layers
    return EngineForm(load_engine(path, layers, recipe_named(name), threads=1, max_positions=DEFAULT_MAX_POSITIONS))


def _main(path: Path, name: str) -> None:
    form = _form(path, name)
    decode(form, 2, 16, 2, 0)  # what is allocated and warmed once is not measured

    def run_prefill(tokens: int, seed: int) -> Mapping[str, object]:
        return prefill(form, tokens, seed)

    def run_decode(sequences: int, prompt: int, tokens: int, seed: int) -> Mapping[str, object]:
        return decode(form, sequences, prompt, tokens, seed)

    serve({"prefill": run_prefill, "decode": run_decode, "limits": lambda: limits(path)})


if __name__ == "__main__":
    _main(Path(sys.argv[1]), sys.argv[2])
