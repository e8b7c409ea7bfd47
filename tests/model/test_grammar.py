"""Grammars over the real vocabulary: whatever the logits, what is drawn is a sentence; and no grammar costs more than it may."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tessella_p2p.base.errors import InvalidRequest, Overloaded
from tessella_p2p.base.limits import MAX_GRAMMAR_CHARS
from tessella_p2p.entry.plan import tail_history
from tessella_p2p.model import grammar_trial
from tessella_p2p.model.artifact import Artifact
from tessella_p2p.model.grammar import Constraint, GrammarCompiler
from tessella_p2p.model.grammar_trial import GrammarTrial
from tessella_p2p.model.tokenizer import Tokenizer
from tessella_p2p.stages.engine import Sampled
from tessella_p2p.stages.sampler import Sampler, answer_of, sampler_of
from tessella_p2p.wire.messages import Grammar, Sampling
from tests.stages.openings import open_body

FIRST = 7
"""Position of the first draw."""
BYTES = GrammarCompiler(
    [bytes([byte]) for byte in range(255)] + [b""], (), [255], lambda text: list(text.encode()), trial=None
)
"""Tokens are bytes; 255, which is in no text, ends an answer."""
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["a", "b", 3, None]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 5}, "maxItems": 3},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}
SCHEMAS: dict[str, dict[str, Any]] = {
    "person": PERSON,
    "nested": {
        "type": "object",
        "properties": {"who": PERSON, "is": {"type": "boolean"}},
        "required": ["who"],
        "additionalProperties": False,
    },
    "either": {"anyOf": [{"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4}, PERSON]},
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4}$"},
    "recursive": {
        "$defs": {
            "tree": {"type": "object", "properties": {"left": {"$ref": "#/$defs/tree"}, "value": {"type": "null"}}}
        },
        "$ref": "#/$defs/tree",
    },
    "number": {"type": "number", "minimum": -1.5, "maximum": 2},
    "constant": {"const": {"naïve": ["🦜", 1]}},
}


@pytest.fixture(scope="module")
def tokenizer(smollm2_path: Path) -> Tokenizer:
    with Artifact.open(smollm2_path) as artifact:
        return artifact.tokenizer


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler.of(tokenizer)


def schema(body: object) -> Grammar:
    return Grammar(kind="json_schema", text=json.dumps(body))


def lark(text: str) -> Grammar:
    return Grammar(kind="lark", text=text)


def sampler(params: Sampling, compiler: GrammarCompiler, answer: tuple[int, ...] = ()) -> Sampler:
    """As a tail makes it, from what an entry sends with an epoch."""
    history, history_answer = tail_history(params, (), answer)
    body = open_body(sampling=params, history=history, history_answer=history_answer)
    assert params.grammar is not None
    return sampler_of(body, 2**20, compiler.compile(params.grammar, answer_of(body)))


def token_at(drawing: Sampler, logits: npt.NDArray[np.float32], position: int) -> int:
    drawn = drawing.draw(logits, position)
    assert isinstance(drawn, Sampled), drawn
    return drawn.token_id


class Logits:
    """Any, with a will to end: after some tokens short closing ones are likely."""

    def __init__(self, seed: int, tokenizer: Tokenizer) -> None:
        self._seed = seed
        pieces = [tokenizer.token_bytes(token) for token in range(tokenizer.vocabulary)]
        self._closing = np.array([0 < len(piece) <= 2 and piece[-1:] in (b'"', b"]", b"}") for piece in pieces])
        self._ends = sorted(tokenizer.end_ids)

    def at(self, position: int) -> npt.NDArray[np.float32]:
        logits = (
            np.random.default_rng([self._seed, position]).standard_normal(len(self._closing)).astype(np.float32) * 3
        )
        if position > FIRST + 24:
            logits[self._closing] += 40
            logits[self._ends] += 80
        return logits


def answer_to(params: Sampling, compiler: GrammarCompiler, logits: Logits, ends: frozenset[int]) -> list[int]:
    """All tokens up to the one that ends the answer."""
    drawing = sampler(params, compiler)
    tokens: list[int] = []
    while not tokens or tokens[-1] not in ends:
        assert len(tokens) < 400
        tokens.append(token_at(drawing, logits.at(FIRST + len(tokens)), FIRST + len(tokens)))
    return tokens


DRAWS = st.sampled_from(
    [{}, {"temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.3}, {"temperature": 2.0, "top_k": 50, "min_p": 0.1}]
)


@pytest.mark.parametrize("body", SCHEMAS.values(), ids=SCHEMAS)
@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32), draws=DRAWS)
def test_whatever_the_logits_an_answer_that_ends_is_valid(
    tokenizer: Tokenizer, compiler: GrammarCompiler, body: dict[str, Any], seed: int, draws: dict[str, Any]
) -> None:
    params = Sampling(grammar=schema(body), seed=seed, **draws)
    tokens = answer_to(params, compiler, Logits(seed, tokenizer), tokenizer.end_ids)
    text = b"".join(map(tokenizer.token_bytes, tokens)).decode("utf-8", "strict")
    jsonschema.validate(json.loads(text), body)
    assert not any(token in tokenizer.control.values() for token in tokens[:-1]), "control tokens are no text"


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32), draws=DRAWS, cut=st.integers(0, 30), again=st.integers(0, 30))
def test_an_answer_that_is_resumed_or_replayed_anywhere_goes_on_with_the_same_tokens(
    tokenizer: Tokenizer, compiler: GrammarCompiler, seed: int, draws: dict[str, Any], cut: int, again: int
) -> None:
    params, logits = Sampling(grammar=schema(PERSON), seed=seed, **draws), Logits(seed, tokenizer)
    tokens = answer_to(params, compiler, logits, tokenizer.end_ids)
    cut, again = min(cut, len(tokens) - 1), min(again, len(tokens) - 1)
    resumed = sampler(params, compiler, tuple(tokens[:cut]))
    for start in (cut, max(cut, again), len(tokens) - 1):
        places = range(FIRST + start, FIRST + len(tokens))
        assert [token_at(resumed, logits.at(place), place) for place in places] == tokens[start:]


def test_an_answer_that_is_complete_can_only_end(tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
    constraint = compiler.compile(schema({"type": "object"}), tokenizer.encode('{"a": [1, 2]}'))
    (ids,) = np.nonzero(constraint.allowed(tokenizer.vocabulary))
    assert set(ids.tolist()) == set(tokenizer.end_ids)


def test_no_bias_brings_back_what_the_grammar_forbids_and_logprobs_stay_the_models_own(
    tokenizer: Tokenizer, compiler: GrammarCompiler
) -> None:
    wrong = tokenizer.encode("x")[0]
    grammar = lark('start: "yes" | "no"')
    logits = np.zeros(tokenizer.vocabulary, np.float32)
    logits[wrong] = 50
    params = Sampling(grammar=grammar, logit_bias=((wrong, 100.0),), num_top=1)
    drawn = Sampler(params, logprobs=True, constraint=compiler.compile(grammar)).draw(logits, 0)
    assert isinstance(drawn, Sampled)
    assert tokenizer.token_bytes(drawn.token_id)[:1] in (b"y", b"n")
    assert drawn.top[0].token_id == wrong
    assert drawn.logprob == pytest.approx(-50.0)


def test_json_may_be_laid_out_but_not_for_ever(tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
    for text in ('{"a":1}', '{"a": 1}', '{\n  "a": 1\n}'):
        compiler.compile(schema({"type": "object"}), tokenizer.encode(text))
    for text in ('{\n\n"', "{  ", '{"a":\n\n'):
        with pytest.raises(InvalidRequest):
            compiler.compile(schema({"type": "object"}), tokenizer.encode(text))


def test_a_grammar_in_lark_may_name_control_tokens(tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
    constraint = compiler.compile(lark('start: <|im_start|> "x"'))
    (ids,) = np.nonzero(constraint.allowed(tokenizer.vocabulary))
    assert ids.tolist() == [tokenizer.control["<|im_start|>"]]


def test_logits_beyond_the_vocabulary_are_never_drawn() -> None:
    constraint = BYTES.compile(lark("start: /.*/"))
    allowed = constraint.allowed(300)
    assert allowed.shape == (300,)
    assert not allowed[256:].any()
    assert BYTES.compile(lark("start: /.*/")).allowed(100).shape == (100,)


# ---- what is refused, and says why ----


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (schema({"type": "foo"}), "Invalid type: foo"),
        (schema({"not": {}}), "Unimplemented keys"),
        (schema({"$ref": "http://example.org/x"}), "not present in a registry"),
        (schema({"type": "string", "pattern": "("}), "unclosed group"),
        (schema(False), "object schema"),
        (schema([1]), "object schema"),
        (schema({"enum": []}), "Unsatisfiable"),
        (Grammar(kind="json_schema", text='{"a":'), "line 1"),
        (Grammar(kind="json_schema", text="[" * 20_000), "recursion limit|expected"),
        (lark("start: ("), "Expected token"),
        (lark("other: /a/"), "no start rule"),
        (lark('{"grammars": []}'), "begins with a brace"),
        (lark('start: <|no such token|> "x"'), "token"),
        (lark('start: "\\ud800"'), "the grammar"),
    ],
)
def test_what_is_no_grammar_is_refused_with_the_reason(
    compiler: GrammarCompiler, grammar: Grammar, reason: str
) -> None:
    with pytest.raises(InvalidRequest, match=reason) as caught:
        compiler.compile(grammar)
    assert caught.value.param == "grammar"
    assert len(str(caught.value)) < 500
    assert "backtrace" not in str(caught.value)


@settings(max_examples=150, deadline=None)
@given(
    grammar=st.builds(
        Grammar,
        kind=st.sampled_from(["json_schema", "lark"]),
        text=st.one_of(
            st.text(min_size=1, max_size=60),
            st.text('start:|()[]{}"/ab*+?~&<>%\n \\', min_size=1, max_size=40).map("start: ".__add__),
            st.recursive(
                st.one_of(st.none(), st.integers(), st.sampled_from(["string", "object", "array", "x"])),
                lambda inner: (
                    st.dictionaries(
                        st.sampled_from(["type", "anyOf", "allOf", "items", "properties", "enum", "maxItems", "$ref"]),
                        inner,
                    )
                    | st.lists(inner, max_size=3)
                ),
                max_leaves=8,
            ).map(json.dumps),
        ),
    ),
    tokens=st.lists(st.integers(0, 300), max_size=3),
)
def test_any_text_gives_a_constraint_or_a_typed_error(grammar: Grammar, tokens: list[int]) -> None:
    try:
        constraint = BYTES.compile(grammar, tokens)
        assert constraint.allowed(256).any()
    except InvalidRequest as error:
        refused = error
    else:
        return
    assert refused.param == "grammar"


@pytest.mark.parametrize("token", [-1, 256, 2**31, 2**64])
def test_a_token_out_of_the_vocabulary_is_refused(token: int) -> None:
    with pytest.raises(InvalidRequest, match="out of the vocabulary"):
        BYTES.compile(lark("start: /.*/"), [token])


def test_a_token_that_may_not_come_is_refused_and_the_constraint_fails_from_then_on() -> None:
    constraint = BYTES.compile(lark('start: "ab"'))
    with pytest.raises(InvalidRequest):
        constraint.accept(ord("b"))
    for call in (lambda: constraint.allowed(256), lambda: constraint.accept(ord("a")), lambda: constraint.take_back(1)):
        with pytest.raises(InvalidRequest):
            call()


def test_a_vocabulary_that_cannot_write_a_grammar_is_an_error_value_at_the_draw() -> None:
    grammar = lark('start: "a" /[0-9]/')
    letters = GrammarCompiler([b"a", b"b", b""], (), [2], lambda text: [0] * len(text))
    drawing = Sampler(Sampling(grammar=grammar), constraint=letters.compile(grammar))
    logits = np.zeros(3, np.float32)
    assert token_at(drawing, logits, 0) == 0
    for _ in range(2):
        assert isinstance(drawing.draw(logits, 1), InvalidRequest)


def test_an_automaton_that_grows_without_end_is_an_error_value_at_the_draw() -> None:
    grammar = schema({"type": "string", "pattern": ".*a.{200}"})
    drawing = Sampler(Sampling(grammar=grammar), constraint=BYTES.compile(grammar))
    rng = np.random.default_rng(1)
    for position in range(1500):
        logits = np.zeros(256, np.float32)
        logits[ord('"') if position == 0 else rng.integers(ord("a"), ord("c"))] = 1
        drawn = drawing.draw(logits, position)
        if isinstance(drawn, InvalidRequest):
            assert "too many states" in str(drawn)
            return
    pytest.fail("it was followed all the way")


AMBIGUOUS = lark('start: s\ns: s s | "a"')
"""What a token takes grows with the square of the answer."""
LETTERS = [b"a", b"b", b""]


class Cpu:
    """Each look at it is so much later than the one before."""

    def __init__(self, step_s: float) -> None:
        self.step_s, self.now = step_s, 0.0

    def __call__(self) -> float:
        self.now += self.step_s
        return self.now


def compiler_of_letters(cpu: Cpu) -> GrammarCompiler:
    return GrammarCompiler(LETTERS, (), [2], lambda text: [0] * len(text), None, cpu)


def test_an_answer_that_takes_too_long_to_follow_is_refused_and_stays_so() -> None:
    with pytest.raises(InvalidRequest, match="too long"):
        compiler_of_letters(Cpu(0.01)).compile(lark("start: /a*/"), [0] * 100)
    cpu = Cpu(0.0)
    constraint = compiler_of_letters(cpu).compile(lark("start: /a*/"))
    cpu.step_s = 1.0
    calls = (lambda: constraint.allowed(3), lambda: constraint.admits(0), lambda: constraint.accept(0))
    for call in calls:
        with pytest.raises(InvalidRequest, match="too long"):
            call()
    cpu.step_s = 0.0
    for call in calls:
        with pytest.raises(InvalidRequest, match="too long"):
            call()


def test_an_answer_may_take_more_the_longer_it_is() -> None:
    constraint = compiler_of_letters(Cpu(0.005)).compile(lark("start: /a*/"))
    for _ in range(1000):
        assert constraint.allowed(3)[0]
    drawn = compiler_of_letters(Cpu(0.00009)).compile(lark("start: /a*/"), [0] * 20_000)
    assert drawn.allowed(3)[0]


def test_what_a_peer_makes_a_tail_follow_first_is_bounded(smollm2_path: Path) -> None:
    began = time.thread_time()
    with Artifact.open(smollm2_path) as artifact:
        token = artifact.tokenizer.encode("a")[0]
        with pytest.raises(InvalidRequest, match=r"too long|items"):
            artifact.grammars.compile(AMBIGUOUS, [token] * 24_000)
    assert time.thread_time() - began < 10  # it was minutes


# ---- the trial ----


def test_what_takes_too_much_to_compile_is_refused_in_time_and_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_trial, "GRAMMAR_TRIAL_CPU_S", 1)
    trial = GrammarTrial()
    trial(schema(PERSON))
    hostile = schema(
        {"allOf": [{"type": "string", "pattern": f"^.*[a-{chr(98 + i)}]{{1,{50 + i}}}.*$"} for i in range(20)]}
    )
    with pytest.raises(InvalidRequest, match="to compile"):
        trial(hostile)

    def no_process(*args: object, **options: object) -> None:
        raise AssertionError("it was known")

    monkeypatch.setattr(subprocess, "run", no_process)
    trial(schema(PERSON))
    with pytest.raises(InvalidRequest, match="to compile"):
        trial(hostile)


def test_what_takes_too_much_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_trial, "GRAMMAR_TRIAL_CPU_S", 60)  # it is not the time
    doubling = {f"d{i}": {"allOf": 2 * [{"$ref": f"#/$defs/d{i + 1}"}]} for i in range(200)}
    hostile = schema({"$defs": {**doubling, "d200": {"type": "string", "pattern": "a*"}}, "$ref": "#/$defs/d0"})
    with pytest.raises(InvalidRequest, match="to compile"):
        GrammarTrial()(hostile)


def test_a_text_that_is_no_grammar_is_left_to_the_compiler_to_refuse() -> None:
    trial = GrammarTrial()
    for grammar in (lark("start: ("), Grammar(kind="json_schema", text="{")):
        trial(grammar)


def test_a_machine_that_cannot_try_is_overloaded_and_remembers_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    trial = GrammarTrial()
    with monkeypatch.context() as patch:
        patch.setattr(grammar_trial, "GRAMMAR_TRIAL_S", 0.0)
        with pytest.raises(Overloaded):
            trial(schema(PERSON))
    trial(schema(PERSON))


def test_a_machine_without_llguidance_where_it_tries_blames_no_grammar(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    child = tmp_path / "child.py"
    child.write_text("import no_such_module")
    monkeypatch.setattr(grammar_trial, "_CHILD", child)
    with pytest.raises(Overloaded, match="no grammar can be tried here"):
        GrammarTrial()(schema(PERSON))


def test_the_compiler_tries_first() -> None:
    def refuse(grammar: Grammar) -> None:
        raise InvalidRequest("too much", "grammar")

    compiler = GrammarCompiler([b"a", b""], (), [1], lambda text: [0] * len(text), refuse)
    with pytest.raises(InvalidRequest, match="too much"):
        compiler.compile(lark("start: /a/"))


def test_a_vocabulary_without_an_end_is_our_own_mistake() -> None:
    with pytest.raises(ValueError, match="end token"):
        GrammarCompiler([b"a"], (), [], lambda text: [])
    with pytest.raises(ValueError, match="come together"):
        Sampler(Sampling(grammar=lark("start: /a/")))


@pytest.mark.parametrize("text", ["", "a" * (MAX_GRAMMAR_CHARS + 1), "é" * (MAX_GRAMMAR_CHARS // 2 + 1)])
def test_a_grammars_text_is_bounded_in_bytes(text: str) -> None:
    with pytest.raises(ValueError, match="text"):
        Grammar(kind="lark", text=text)


def test_constraints_share_nothing() -> None:
    grammar = lark("start: /[ab]*/ | /c/")
    first, second = BYTES.compile(grammar), BYTES.compile(grammar)
    first.accept(ord("a"))
    assert isinstance(second, Constraint)
    assert second.allowed(256)[ord("c")]
    assert not first.allowed(256)[ord("c")]
