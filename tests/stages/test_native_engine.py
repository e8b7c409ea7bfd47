"""The native engine: the tokens of transformers, the numbers of float64, hostile steps that hurt nobody else, and cached prefixes."""

from __future__ import annotations

import ctypes
import gc
import json
import weakref
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import numpy as np
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tessella_p2p.base.errors import (
    CacheMiss,
    ConfigurationError,
    InvalidStep,
    NotCertified,
    Overloaded,
    PromptTooLong,
    TessellaError,
)
from tessella_p2p.base.ids import LayerRange
from tessella_p2p.base.limits import KV_IDLE_S
from tessella_p2p.model.gguf import GgmlType
from tessella_p2p.model.recipe import RECIPES
from tessella_p2p.stages import native_engine, native_proof
from tessella_p2p.stages.engine import Sampled, StepAnswer, StepInput, StepOutput
from tessella_p2p.stages.loading import load_engine, published_name
from tessella_p2p.stages.native_engine import NativeEngine
from tessella_p2p.wire.frames import DType
from tests.model.tiny_gguf import VOCABULARY, Stored, build, floats, tiny_llama, write_tiny_llama
from tests.stages.reference_llama import ReferenceLlama
from tests.stages.stage_runs import GREEDY, alone, first_step, key_of, mixed, play, random_prompts, through

WHOLE = LayerRange(0, 3)
HEAD = LayerRange(0, 2)
MIDDLE = LayerRange(1, 2)
F32 = RECIPES["f32"]
CASES = json.loads((Path(__file__).parents[1] / "data" / "greedy_f32.json").read_text())["cases"]
PAGE_BYTES = 64 * (2 * 2 * 2 * 16 + 64) * 4
"""Of `HEAD`: two layers' keys and values of two heads, and the rows that the prefix cache keeps."""
LEAST_GAP = 0.02
"""Between logits that are nearer than this, rounding decides."""
PROMPT = random_prompts([150], VOCABULARY)[0]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"), matrices=GgmlType.Q4_1)


def load(
    path: Path,
    layers: LayerRange = WHOLE,
    *,
    threads: int = 1,
    max_sessions: int = 4,
    max_positions: int = 256,
    kv_bytes: int | None = None,
    portable: bool = False,
    recipe: str = "f32",
) -> NativeEngine:
    return NativeEngine.load(
        path,
        layers,
        RECIPES[recipe],
        threads=threads,
        max_sessions=max_sessions,
        max_positions=max_positions,
        kv_bytes=kv_bytes,
        portable=portable,
    )


def body_of(answer: StepAnswer) -> bytes:
    assert isinstance(answer, StepOutput), answer
    return bytes(answer.body)


def hidden(rows: int, value: float = 1.0, width: int = 64) -> bytes:
    return (np.linspace(-1, 1, rows * width) * value).astype("<f4").tobytes()


def middle_step(session: int, body: bytes, position: int = 0) -> StepInput:
    return StepInput(key_of(session), position, len(body) // 256, DType.F32, body)


# ---- the right numbers ----


def certain(case: int) -> list[int]:
    """The reference's tokens, up to the first step that was nearly a tie."""
    gaps = CASES[case]["gaps"]
    end = next((index for index, gap in enumerate(gaps) if gap <= LEAST_GAP), len(gaps))
    ids: list[int] = CASES[case]["output_ids"][:end]
    return ids


def generated(engines: list[NativeEngine], wanted: dict[int, list[int]]) -> dict[int, list[int]]:
    """Greedy tokens of several cases in one continuous batch; ``wanted`` says how many of each."""
    inputs = {case: list(CASES[case]["prompt_ids"]) for case in wanted}
    positions = dict.fromkeys(wanted, 0)
    tokens: dict[int, list[int]] = {case: [] for case in wanted}
    for case in wanted:
        for engine in engines:
            engine.open_session(key_of(case), 256)
    while active := [case for case in wanted if len(tokens[case]) < len(wanted[case])]:
        steps = [first_step(case, inputs[case], position=positions[case], sample=GREEDY) for case in active]
        for case, answer in zip(active, through(engines, steps), strict=True):
            assert isinstance(answer, Sampled)
            positions[case] += len(inputs[case])
            inputs[case] = [answer.token_id]
            tokens[case].append(answer.token_id)
    for case in wanted:
        for engine in engines:
            engine.close_session(key_of(case))
    return tokens


def test_every_case_says_what_transformers_says_alone_and_in_one_batch_and_cut(smollm2_path: Path) -> None:
    wanted = {case: certain(case) for case in range(len(CASES))}
    assert all(len(ids) >= 8 for ids in wanted.values())
    whole = [load(smollm2_path, LayerRange(0, 30), max_sessions=len(CASES))]
    assert generated(whole, wanted) == wanted
    for case, ids in wanted.items():
        few = {case: ids[:6]}
        assert generated(whole, few) == few
    cut = [load(smollm2_path, LayerRange(*layers)) for layers in pairwise((0, 8, 19, 30))]
    few = {case: wanted[case][:6] for case in (0, 3, 9)}
    assert generated(cut, few) == few


@pytest.mark.parametrize("matrices", [GgmlType.F32, GgmlType.Q4_1])
@pytest.mark.parametrize("tied", [True, False])
def test_rows_and_tokens_are_those_of_float64_within_float32(tmp_path: Path, matrices: GgmlType, tied: bool) -> None:
    metadata, tensors = tiny_llama(matrices=matrices, tied=tied)
    path = tmp_path / "tiny.gguf"
    path.write_bytes(build(metadata, tensors))
    reference = ReferenceLlama(metadata, tensors)
    rows = play([load(path, HEAD)], {0: PROMPT}, alone({0: PROMPT}, 37)).rows[0]
    expected = reference.hidden(PROMPT, 2)
    got = np.frombuffer(rows, "<f4").reshape(expected.shape)
    assert np.abs(got - expected).max() < 2e-4
    assert np.sqrt(((got - expected) ** 2).mean() / (expected**2).mean()) < 2e-6
    tokens = play([load(path)], {0: PROMPT}, alone({0: PROMPT}, 1)).tokens
    logits = reference.logits(PROMPT)
    for position in range(1, len(PROMPT) + 1):
        assert logits[position - 1][tokens[0, position]] > logits[position - 1].max() - 1e-3


def test_heads_may_be_wider_than_the_hidden_size_together(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    metadata, tensors = tiny_llama(
        metadata={
            "llama.attention.key_length": 48,
            "llama.rope.dimension_count": 48,
            "llama.attention.value_length": 48,
        }
    )
    for layer in range(3):
        for name, shape in (("q", (192, 64)), ("k", (96, 64)), ("v", (96, 64)), ("output", (64, 192))):
            tensors[f"blk.{layer}.attn_{name}.weight"] = floats((rng.standard_normal(shape) * 0.15).astype(np.float32))
    path = tmp_path / "wide.gguf"
    path.write_bytes(build(metadata, tensors))
    rows = play([load(path, HEAD)], {0: PROMPT}, alone({0: PROMPT}, 150)).rows[0]
    assert (
        np.abs(np.frombuffer(rows, "<f4").reshape(150, 64) - ReferenceLlama(metadata, tensors).hidden(PROMPT, 2)).max()
        < 2e-4
    )


# ---- the same bits ----


@pytest.fixture(scope="module")
def engines(tiny: Path) -> list[NativeEngine]:
    """One in vectors and one in plain C, on several threads, with fewer pages than sessions could have."""
    return [load(tiny, HEAD, threads=3, kv_bytes=14 * PAGE_BYTES), load(tiny, HEAD, portable=True)]


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32), st.lists(st.integers(1, 140), min_size=1, max_size=4), st.booleans())
def test_any_schedule_on_any_pages_gives_the_same_bits(
    engines: list[NativeEngine], seed: int, lengths: list[int], with_scope: bool
) -> None:
    """Pages are full of NaN, handed out in any order, and used again: nothing behind a row's own position is ever read into it."""
    engine, plain = engines
    prompts = random_prompts(lengths, VOCABULARY, seed % 5)
    expected = play([plain], prompts, alone(prompts, 256)).rows
    rng = np.random.default_rng(seed)
    free = engine._kv._pool._free
    free[:] = rng.permutation(free).tolist()
    engine._arena[free] = np.nan
    assert play([engine], prompts, mixed(prompts, seed)).rows == expected


def test_plain_c_gives_the_bits_of_the_vectors_on_real_weights(smollm2_path: Path) -> None:
    prompts = random_prompts([3, 20], 49152)
    layers = LayerRange(0, 1)
    vectors = play([load(smollm2_path, layers)], prompts, mixed(prompts, 1)).rows
    assert play([load(smollm2_path, layers, portable=True)], prompts, alone(prompts, 7)).rows == vectors


# ---- hostile steps ----


def bad_steps() -> dict[str, StepInput]:
    """Steps that a stage behind the head must refuse, each for session 2 at position 0."""
    key, good = key_of(2), hidden(2)
    spoiled = {}
    for name, value in (("nan", np.nan), ("inf", np.inf), ("minus inf", -np.inf)):
        rows = np.frombuffer(good, "<f4").copy()
        rows[100] = value
        spoiled[name] = StepInput(key, 0, 2, DType.F32, rows.tobytes())
    return {
        **spoiled,
        "token ids": first_step(2, [1, 2]),
        "another dtype": StepInput(key, 0, 2, DType.F16, good),
        "too few bytes": StepInput(key, 0, 2, DType.F32, good[:-1]),
        "too many bytes": StepInput(key, 0, 2, DType.F32, good + good),
        "no rows": StepInput(key, 0, 0, DType.F32, b""),
        "negative rows": StepInput(key, 0, -1, DType.F32, good),
        "a gap": StepInput(key, 1, 2, DType.F32, good),
        "before the beginning": StepInput(key, -1, 2, DType.F32, good),
        "behind all numbers": StepInput(key, 2**63, 2, DType.F32, good),
    }


@pytest.mark.parametrize("name", sorted(bad_steps()))
def test_a_spoiled_step_is_refused_and_its_neighbours_bits_stay(tiny: Path, name: str) -> None:
    engine = load(tiny, MIDDLE)
    for session in (1, 2, 3):
        engine.open_session(key_of(session), 64, b"a scope")
    (answer,) = engine.forward([middle_step(3, hidden(2))])
    expected = body_of(answer)
    refused, beside = engine.forward([bad_steps()[name], middle_step(1, hidden(2))])
    assert isinstance(refused, InvalidStep)
    assert body_of(beside) == expected
    (after,) = engine.forward([middle_step(2, hidden(2))])
    assert body_of(after) == expected


def test_a_sessions_second_step_in_a_batch_is_refused(tiny: Path) -> None:
    engine = load(tiny, HEAD)
    engine.open_session(key_of(1), 200, b"a scope")
    first, second = engine.forward([first_step(1, [1] * 70), first_step(1, [1] * 70)])
    assert isinstance(first, StepOutput)
    assert isinstance(second, InvalidStep)
    assert isinstance(engine.forward([first_step(1, [1], position=70)])[0], StepOutput)


def test_finite_rows_whose_result_is_not_leave_nothing_behind(tmp_path: Path) -> None:
    metadata, tensors = tiny_llama()
    tensors["blk.1.attn_v.weight"] = floats(np.full((32, 64), 3e38, np.float32))
    path = tmp_path / "tiny.gguf"
    path.write_bytes(build(metadata, tensors))
    engine = load(path, MIDDLE, max_sessions=1)
    engine.open_session(key_of(1), 100, b"a scope")
    zeros = bytes(70 * 256)  # the only rows that such values leave finite
    (refused,) = engine.forward([middle_step(1, np.ones(3 * 64, "<f4").tobytes())])
    assert isinstance(refused, InvalidStep)
    assert body_of(engine.forward([middle_step(1, zeros)])[0]) == zeros
    (refused,) = engine.forward([middle_step(1, np.ones(64, "<f4").tobytes(), 70)])
    assert isinstance(refused, InvalidStep)
    assert body_of(engine.forward([middle_step(1, bytes(256), 70)])[0]) == bytes(256)
    # behind a cached prefix as well: the session goes back to where the prefix began
    engine.close_session(key_of(1))
    engine.open_session(key_of(1), 100, b"a scope")
    (refused,) = engine.forward([middle_step(1, bytes(64 * 256) + np.ones(64, "<f4").tobytes())])
    assert isinstance(refused, InvalidStep)
    assert engine.kv.prefix_positions_hit == 0
    assert body_of(engine.forward([middle_step(1, zeros)])[0]) == zeros
    assert engine.kv.prefix_positions_hit == 64


def test_logits_that_overflow_are_refused_and_the_session_goes_on(tmp_path: Path) -> None:
    metadata, tensors = tiny_llama()
    output = np.zeros((VOCABULARY, 64), np.float32)
    output[7] = 3e38
    tensors["output.weight"] = floats(output)
    path = tmp_path / "tiny.gguf"
    path.write_bytes(build(metadata, tensors))
    engine = load(path)
    engine.open_session(key_of(1), 8)
    (refused,) = engine.forward([first_step(1, [1, 2], sample=GREEDY)])
    assert isinstance(refused, InvalidStep)
    assert engine.forward([first_step(1, [1, 2])]) == [None]


@pytest.mark.parametrize("token", [VOCABULARY, 2**31 - 1, 2**31, 2**32 - 1])
def test_token_ids_out_of_the_vocabulary_are_refused(tiny: Path, token: int) -> None:
    engine = load(tiny, HEAD)
    engine.open_session(key_of(1), 8)
    (answer,) = engine.forward([first_step(1, [0, token])])
    assert isinstance(answer, InvalidStep)
    assert str(token) in str(answer)
    assert isinstance(engine.forward([first_step(1, [0, VOCABULARY - 1])])[0], StepOutput)


def test_sessions_are_isolated_bounded_and_in_order(tiny: Path) -> None:
    engine = load(tiny)
    with pytest.raises(PromptTooLong):
        engine.open_session(key_of(1), 257)
    for session in range(4):
        engine.open_session(key_of(session), 4)
    with pytest.raises(Overloaded):
        engine.open_session(key_of(9), 4)
    steps = [
        first_step(1, [1, 2], sample=GREEDY),
        first_step(9, [1]),
        first_step(2, [1] * 5),
        first_step(1, [3], position=2),
    ]
    answers = engine.forward(steps)
    assert [type(answer) for answer in answers] == [Sampled, CacheMiss, PromptTooLong, InvalidStep]
    assert isinstance(engine.forward([steps[0]])[0], InvalidStep)
    assert engine.forward([first_step(1, [3], position=2)]) == [None]
    engine.close_session(key_of(1))
    engine.close_session(key_of(1))
    assert isinstance(engine.forward([first_step(1, [3], position=3)])[0], CacheMiss)


def test_a_batch_longer_than_one_call_has_the_same_bits(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = random_prompts([150, 1, 99], VOCABULARY)
    together = [[(0, 150), (1, 1), (2, 99)]]
    expected = play([load(tiny, HEAD)], prompts, together).rows
    monkeypatch.setattr(native_engine, "_MAX_ROWS", 13)
    assert play([load(tiny, HEAD)], prompts, together).rows == expected


# ---- pages ----


def test_a_full_kv_refuses_the_newcomer_and_evicts_the_idle(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = load(tiny, HEAD, kv_bytes=3 * PAGE_BYTES + 5)
    assert engine.kv.pages_total == 3
    now = 100.0
    monkeypatch.setattr("tessella_p2p.stages.native_engine.time.monotonic", lambda: now)
    engine.open_session(key_of(1), 192)
    expected = play([load(tiny, HEAD)], {5: PROMPT[:71]}, [[(5, 70)], [(5, 1)]]).rows[5]
    first = body_of(engine.forward([first_step(1, PROMPT[:70])])[0])
    now += KV_IDLE_S + 1
    engine.open_session(key_of(2), 192)  # the first is idle, but goes on:
    beside, refused = engine.forward([first_step(1, PROMPT[70:71], position=70), first_step(2, PROMPT[:70])])
    assert isinstance(refused, Overloaded)
    assert first + body_of(beside) == expected
    now += KV_IDLE_S + 1
    rows = body_of(engine.forward([first_step(2, PROMPT[:70])])[0])
    assert rows + body_of(engine.forward([first_step(2, PROMPT[70:71], position=70)])[0]) == expected
    (gone,) = engine.forward([first_step(1, [1], position=71)])
    assert isinstance(gone, CacheMiss)
    assert "idle" in str(gone)
    assert engine.kv.sessions_evicted == 1


@pytest.mark.parametrize("layers", [HEAD, MIDDLE, WHOLE], ids=str)
def test_a_cached_prefix_changes_no_bit_downstream_and_no_token(tiny: Path, layers: LayerRange) -> None:
    fresh, engine = load(tiny, layers), load(tiny, layers)

    def prompt_step(session: int, start: int, end: int) -> StepInput:
        if layers.start:
            return middle_step(session, hidden(150)[start * 256 : end * 256], start)
        return first_step(session, PROMPT[start:end], position=start, sample=GREEDY if layers is WHOLE else None)

    def answers(of: NativeEngine, session: int, scope: bytes, cuts: tuple[int, ...]) -> list[StepAnswer | bytes]:
        of.open_session(key_of(session), 150, scope)
        got = [of.forward([prompt_step(session, *piece)])[0] for piece in pairwise(cuts)]
        of.close_session(key_of(session))
        assert not any(isinstance(answer, TessellaError) for answer in got)
        return [bytes(answer.body) if isinstance(answer, StepOutput) else answer for answer in got]

    cuts = (0, 128, 149, 150)
    expected = answers(fresh, 1, b"", cuts)
    hits = []
    for session, scope in enumerate((b"a", b"a", b"b", b"", b"a")):
        assert answers(engine, session, scope, cuts) == expected
        hits.append(engine.kv.prefix_positions_hit)
    # a tail computes the row that it draws from: of two pages it takes one
    served = 64 if layers is WHOLE else 128
    assert hits == [0, served, served, served, 2 * served]
    if layers is not WHOLE:
        recut = answers(engine, 9, b"a", (0, 64, 100, 150))
        assert b"".join(part for part in recut if isinstance(part, bytes)) == b"".join(
            part for part in expected if isinstance(part, bytes)
        )


# ---- life ----


def test_a_whole_model_holds_a_tied_embedding_once(tmp_path: Path) -> None:
    sizes = []
    for tied in (True, False):
        path = tmp_path / f"{tied}.gguf"
        path.write_bytes(build(*tiny_llama(tied=tied)))
        sizes.append(load(path).memory_bytes)
    assert sizes[1] - sizes[0] == VOCABULARY * 64 * 4


def resident() -> int:
    gc.collect()
    with suppress(OSError, AttributeError):  # what glibc keeps of earlier engines would hide a new one's growth
        ctypes.CDLL(None).malloc_trim(0)
    size: int = psutil.Process().memory_info().rss
    return size


def test_memory_grows_by_what_a_stage_says_and_is_given_back(smollm2_path: Path) -> None:
    before = resident()
    engine = load(smollm2_path, LayerRange(20, 30), max_sessions=2)
    for session in (1, 2):
        engine.open_session(key_of(session), 256)
        assert engine.forward([StepInput(key_of(session), 0, 256, DType.F32, bytes(256 * 576 * 4))]) == [None]
    grown = resident() - before
    assert 0.8 * engine.memory_bytes < grown < 1.6 * engine.memory_bytes
    engine.close()
    assert resident() - before < 0.5 * grown  # and yet the object is still there


def test_an_engine_may_be_closed_twice_or_dropped(tiny: Path) -> None:
    num_threads = psutil.Process().num_threads()
    engine = load(tiny, threads=3)
    engine.close()
    engine.close()
    assert (engine.max_positions, engine.kv.pages_used) == (256, 0)
    dropped = load(tiny, threads=3)
    dropped.open_session(key_of(1), 8)
    dropped.forward([first_step(1, [1, 2])])
    seen = weakref.ref(dropped._kernels)
    del dropped, engine
    gc.collect()
    assert seen() is None
    assert psutil.Process().num_threads() == num_threads


def test_what_the_kernels_do_not_have_is_refused_by_name(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for threads, sessions, positions in ((0, 1, 1), (1, 0, 1), (1, 10**6, 1), (1, 1, 0)):
        with pytest.raises(ConfigurationError):
            load_engine(tiny, WHOLE, RECIPES["f32"], threads=threads, max_sessions=sessions, max_positions=positions)
    with pytest.raises(ConfigurationError, match="49152"):
        load(tiny, kv_bytes=49151)
    for shape, match in (((8, 8), "head size"), ((2, 64), "query heads")):
        head_dim, heads = shape
        metadata, tensors = tiny_llama(
            metadata={
                "llama.attention.head_count": heads,
                "llama.attention.head_count_kv": 1 if heads == 64 else 2,
                "llama.attention.key_length": head_dim if heads == 8 else 16,
            }
        )
        q_rows, kv_rows = (
            heads * (head_dim if heads == 8 else 16),
            (head_dim if heads == 8 else 16) * (1 if heads == 64 else 2),
        )
        for layer in range(3):
            for name, rows, columns in (
                ("q", q_rows, 64),
                ("k", kv_rows, 64),
                ("v", kv_rows, 64),
                ("output", 64, q_rows),
            ):
                tensors[f"blk.{layer}.attn_{name}.weight"] = Stored(
                    (rows, columns), GgmlType.F32, bytes(4 * rows * columns)
                )
        path = tmp_path / "odd.gguf"
        path.write_bytes(build(metadata, tensors))
        with pytest.raises(NotCertified, match=match):
            load(path)
    native_proof.prove_kernels.cache_clear()
    monkeypatch.setattr(native_proof, "KNOWN_ANSWER", "00" * 16)
    for refused in (lambda: load(tiny), lambda: published_name(RECIPES["f32"])):
        with pytest.raises(NotCertified, match="other bits"):
            refused()
    monkeypatch.undo()
    native_proof.prove_kernels()
