"""The peak memory of a stage in a fresh process.

``python -m benchmarks.stage_memory MODEL RECIPE START END`` prints one line of JSON.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from benchmarks.token_runs import prompts
from tessella_p2p.base.errors import TessellaError
from tessella_p2p.base.ids import LayerRange, SessionId
from tessella_p2p.model.config import ModelConfig
from tessella_p2p.model.gguf import GgufFile
from tessella_p2p.model.recipe import recipe_named
from tessella_p2p.stages.engine import SessionKey, StageEngine, StepInput
from tessella_p2p.stages.loading import load_engine
from tessella_p2p.stages.sampler import Sampler
from tessella_p2p.wire.frames import DType
from tessella_p2p.wire.messages import Sampling

SESSIONS = 8
PROMPT_TOKENS = 512
CHUNK_ROWS = 128
DECODE_STEPS = 8


@dataclass(frozen=True, slots=True)
class StageMemory:
    """What was counted, in bytes.

    Attributes:
        peak: the highest resident set of the process since its start: interpreter, libraries, mapped file pages and all.
        before: the same before the engine was loaded (its modules may be imported later).
        tensors: the stage's tensors as the file stores them.
        kv: pages of KV that were in use at the end.
    """

    peak: int
    before: int
    tensors: int
    kv: int


def measure(path: Path, recipe: str, layers: LayerRange) -> StageMemory:
    """Load a stage, give it `SESSIONS` prompts of `PROMPT_TOKENS` in chunks, and some steps of all of them together."""
    with GgufFile.open(path) as file:
        config = ModelConfig.from_gguf(file)
        tensors = sum(file.tensors[name].size_bytes for name in config.tensor_shapes(layers))
    before = peak_bytes()
    engine = load_engine(path, layers, recipe_named(recipe), threads=1)
    keys = [SessionKey(SessionId(number.to_bytes(16, "big")), 0) for number in range(SESSIONS)]
    for key in keys:
        engine.open_session(key, PROMPT_TOKENS + DECODE_STEPS)
        for start in range(0, PROMPT_TOKENS, CHUNK_ROWS):
            _forward(engine, [_step(engine, key, start, CHUNK_ROWS)])
    for position in range(PROMPT_TOKENS, PROMPT_TOKENS + DECODE_STEPS):
        _forward(engine, [_step(engine, key, position, 1) for key in keys])
    return StageMemory(peak_bytes(), before, tensors, engine.kv.pages_used * engine.kv.page_bytes)


def _step(engine: StageEngine, key: SessionKey, position: int, rows: int) -> StepInput:
    """Token ids for a head, for the others hidden states of about the size that they have."""
    sampler = Sampler(Sampling()) if engine.is_tail else None
    if engine.is_head:
        (ids,) = prompts(1, rows, position)
        return StepInput(key, position, rows, DType.U32, np.array(ids, "<u4").tobytes(), sampler)
    hidden = np.random.default_rng(position).standard_normal((rows, engine.hidden_size), np.float32)
    return StepInput(key, position, rows, engine.wire_dtype, _encoded(hidden, engine.wire_dtype), sampler)


def _encoded(hidden: np.ndarray[tuple[int, int], np.dtype[np.float32]], dtype: DType) -> bytes:
    if dtype is DType.F16:
        return hidden.astype("<f2").tobytes()
    if dtype is DType.BF16:
        return (hidden.view("<u4") >> np.uint32(16)).astype("<u2").tobytes()
    return hidden.astype("<f4").tobytes()


def _forward(engine: StageEngine, steps: list[StepInput]) -> None:
    for answer in engine.forward(steps):
        if isinstance(answer, TessellaError):
            raise answer


def peak_bytes() -> int:
    """The highest resident set of this process since its start. ``ru_maxrss`` would begin with that of whoever started it."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except OSError:
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS
    (line,) = (line for line in lines if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    _, _path, _recipe, _start, _end = sys.argv
    print(json.dumps(asdict(measure(Path(_path), _recipe, LayerRange(int(_start), int(_end))))))
