"""``python -m benchmarks.gpu_check``: the torch engine on this machine's GPU: are its tokens right, and how fast is it?

For every recipe that the device computes: greedy tokens against the reference (transformers, float32, ``tests/data/greedy_f32.json``),
whether a batch changes a row's bits, prefill and decode rates, memory. Without a GPU it says so, and that is no failure. With
``--device cpu`` the same goes through the CPU, to see that the script itself works.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import click
import numpy as np

from tessella_p2p.base.errors import ConfigurationError, TessellaError
from tessella_p2p.base.ids import LayerRange, SessionId
from tessella_p2p.base.limits import MIB
from tessella_p2p.model.config import ModelConfig
from tessella_p2p.model.gguf import GgufFile
from tessella_p2p.model.recipe import RECIPES, Recipe
from tessella_p2p.stages.engine import Sampled, SessionKey, StageEngine, StepInput, StepOutput
from tessella_p2p.stages.loading import load_engine, published_name
from tessella_p2p.stages.sampler import Sampler
from tessella_p2p.weights.catalog import SMOLLM2_135M_INSTRUCT
from tessella_p2p.weights.store import default_models_dir, resolve
from tessella_p2p.wire.frames import DType
from tessella_p2p.wire.messages import Sampling

GREEDY = Sampler(Sampling())
REFERENCE = Path(__file__).parents[1] / "tests" / "data" / "greedy_f32.json"
LEAST_GAP = {"torch-f32": 0.02, "torch-f16": 0.1, "torch-bf16": 0.75, "torch-int4": 1.0}
"""Between logits of the reference that are nearer than this, a recipe's rounding may decide: the case ends there."""
PROMPT_TOKENS = 512
DECODE_STEPS = 48
MAX_POSITIONS = 1024
MAX_SESSIONS = 16


class _Runner:
    """One engine, and sessions that are numbered as they are opened."""

    def __init__(self, engine: StageEngine) -> None:
        self.engine = engine
        self._opened = 0

    def open(self) -> SessionKey:
        key = SessionKey(SessionId(self._opened.to_bytes(16, "big")), 0)
        self._opened += 1
        self.engine.open_session(key, MAX_POSITIONS)
        return key

    def step(self, steps: Sequence[tuple[SessionKey, int, Sequence[int]]]) -> list[int]:
        """One forward of (session, position, token ids); the token drawn for each."""
        inputs = [
            StepInput(key, position, len(ids), DType.U32, np.array(ids, "<u4").tobytes(), GREEDY)
            for key, position, ids in steps
        ]
        tokens = []
        for answer in self.engine.forward(inputs):
            if not isinstance(answer, Sampled):
                raise answer if isinstance(answer, TessellaError) else AssertionError(answer)
            tokens.append(answer.token_id)
        return tokens

    def generate(self, prompts: Sequence[Sequence[int]], most: int) -> tuple[list[list[int]], float]:
        """Greedy tokens of several prompts in one batch, and the seconds that the steps after the first one took."""
        keys = [self.open() for _ in prompts]
        ends = [len(prompt) for prompt in prompts]
        tokens = [[token] for token in self.step([(key, 0, ids) for key, ids in zip(keys, prompts, strict=True)])]
        started = time.perf_counter()
        for _ in range(most - 1):
            drawn = self.step([(keys[i], ends[i], tokens[i][-1:]) for i in range(len(keys))])
            for i, token in enumerate(drawn):
                ends[i] += 1
                tokens[i].append(token)
        elapsed_s = time.perf_counter() - started
        for key in keys:
            self.engine.close_session(key)
        return tokens, elapsed_s

    def prefill_s(self, prompt: Sequence[int]) -> float:
        key = self.open()
        started = time.perf_counter()
        self.step([(key, 0, prompt)])
        elapsed_s = time.perf_counter() - started
        self.engine.close_session(key)
        return elapsed_s


def _compare_tokens(runner: _Runner, least_gap: float) -> tuple[int, int]:
    """(tokens that are the reference's, tokens compared) over all cases in one batch, each up to its first near-tie."""
    cases = json.loads(REFERENCE.read_text(encoding="utf-8"))["cases"]
    certain = [next((i for i, gap in enumerate(c["gaps"]) if gap <= least_gap), len(c["gaps"])) for c in cases]
    answers, _ = runner.generate([case["prompt_ids"] for case in cases], max(certain))
    right = 0
    for got, case, count in zip(answers, cases, certain, strict=True):
        wanted = case["output_ids"][:count]
        right += next((i for i, (a, b) in enumerate(zip(got, wanted, strict=False)) if a != b), count)
    return right, sum(certain)


def _rows_in_a_batch(path: Path, recipe: Recipe, device: str) -> bool:
    """Whether two layers give a session the same bytes alone and among seven others."""
    engine = load_engine(path, LayerRange(0, 2), recipe, device=device, max_positions=64, max_sessions=8)
    keys = [SessionKey(SessionId(i.to_bytes(16, "big")), 0) for i in range(8)]

    def rows(some: Sequence[SessionKey]) -> bytes:
        for key in some:
            engine.open_session(key, 64)
        ids = np.arange(100, 137, dtype="<u4")
        answer = engine.forward([StepInput(key, 0, ids.size, DType.U32, ids.tobytes()) for key in some])[0]
        for key in some:
            engine.close_session(key)
        if not isinstance(answer, StepOutput):
            raise answer if isinstance(answer, TessellaError) else AssertionError(answer)
        return bytes(answer.body)

    same = rows(keys[:1]) == rows(keys)
    engine.close()
    return same


def _check(path: Path, recipe: Recipe, device: str) -> bool:
    """Print what one recipe does; True where no token is wrong."""
    with GgufFile.open(path) as file:
        layers = ModelConfig.from_gguf(file).all_layers
    engine = load_engine(path, layers, recipe, device=device, max_positions=MAX_POSITIONS, max_sessions=MAX_SESSIONS)
    runner = _Runner(engine)
    click.echo(published_name(recipe, device))
    click.echo(f"  memory with every KV slot full: {engine.memory_bytes / MIB:.0f} MiB")
    prompt = [(7 * i) % 4096 + 100 for i in range(PROMPT_TOKENS)]
    runner.prefill_s(prompt)  # kernels are chosen and compiled at first use
    right, compared = _compare_tokens(runner, LEAST_GAP[recipe.name])
    click.echo(f"  tokens as the reference's before a near-tie: {right} of {compared}")
    click.echo(f"  rows have the same bits in a batch: {'yes' if _rows_in_a_batch(path, recipe, device) else 'no'}")
    click.echo(
        f"  prefill {PROMPT_TOKENS}: {median(PROMPT_TOKENS / runner.prefill_s(prompt) for _ in range(5)):.0f} tok/s"
    )
    for batch in (1, 8):
        _, elapsed_s = runner.generate([prompt[:128]] * batch, DECODE_STEPS)
        click.echo(f"  decode, {batch} at once: {batch * (DECODE_STEPS - 1) / elapsed_s:.0f} tok/s")
    engine.close()
    return right == compared


@click.command()
@click.option("--device", default="gpu", show_default=True, help="cpu, cuda, cuda:N or mps; gpu takes what is there.")
@click.option("--model", default=SMOLLM2_135M_INSTRUCT.model_id, show_default=True, help="The model of the reference.")
@click.option("--recipe", "names", multiple=True, help="Only this one; may be repeated.")
def main(device: str, model: str, names: tuple[str, ...]) -> None:
    """Check tokens and speed of the torch recipes on a device. Exit status 1: a token is wrong."""
    import torch

    if device == "gpu":
        device = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else ""
        if not device:
            click.echo(f"torch {torch.__version__} finds no GPU here; nothing was checked")
            return
    try:
        path = resolve(model, default_models_dir())
        name = torch.cuda.get_device_name(device) if device.startswith("cuda") else device
        click.echo(f"device {device}: {name}, torch {torch.__version__}")
        on_device = [recipe for recipe in RECIPES.values() if recipe.engine == "torch"]
        if device != "cpu":
            on_device = [recipe for recipe in on_device if not recipe.is_cpu_only]
        if names:
            on_device = [recipe for recipe in on_device if recipe.name in names]
        results = [_check(path, recipe, device) for recipe in on_device]
    except ConfigurationError as error:
        raise click.ClickException(str(error)) from error
    sys.exit(not all(results))


if __name__ == "__main__":
    main()
