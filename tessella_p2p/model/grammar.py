"""Answers that follow a grammar: which tokens may come next (pure; the automata are llguidance's).

A grammar comes from whoever asks, and through a peer: its text is bounded by the message, what it costs to follow by `_LIMITS`, and
what it costs to compile, which llguidance bounds only in part, by a trial elsewhere (`model.grammar_trial`). llguidance catches its own
panics, and an automaton that has failed says so for ever; both are `InvalidRequest` here.

What is allowed is counted and never timed, so it is the same on every machine: a tail's draws can be repeated by an auditor, and by
another tail from the answer alone. That holds for one release of llguidance, which is therefore pinned. Only giving up is timed too:
llguidance counts what a mask takes, and not what a token does, which for an ambiguous grammar is a thousand times the usual.

A token may come next if its bytes do. Where the grammar leaves no choice of bytes, the token is the one that the model's own tokenizer
would write there. Control tokens stand for no bytes: a grammar in Lark may name them (``<|im_end|>``), nothing else lets them through.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from tessella_p2p.base.errors import InvalidRequest
from tessella_p2p.base.limits import (
    GRAMMAR_ANSWER_CPU_S,
    GRAMMAR_COMPILE_FUEL,
    GRAMMAR_DRAW_CPU_S,
    GRAMMAR_STEP_FUEL,
    GRAMMAR_TOKEN_CPU_S,
    MAX_GRAMMAR_ITEMS,
    MAX_GRAMMAR_REASON_CHARS,
    MAX_GRAMMAR_ROW_ITEMS,
    MAX_GRAMMAR_STATES,
    MAX_GRAMMAR_SYMBOLS,
)
from tessella_p2p.model.tokenizer import Tokenizer
from tessella_p2p.wire.messages import Grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_LIMITS: Final[Mapping[str, Any]] = {
    "initial_lexer_fuel": GRAMMAR_COMPILE_FUEL,
    "step_lexer_fuel": GRAMMAR_STEP_FUEL,
    "step_max_items": MAX_GRAMMAR_ITEMS,
    "max_items_in_row": MAX_GRAMMAR_ROW_ITEMS,
    "max_lexer_states": MAX_GRAMMAR_STATES,
    "max_grammar_size": MAX_GRAMMAR_SYMBOLS,
    "precompute_large_lexemes": False,  # it goes over the whole vocabulary before the first token, however large the automaton
    "verbose_errors": False,
}
JSON_WHITESPACE: Final = r"[ ]?|\n[ ]{0,16}"
"""Between the parts of a JSON text: what writers of JSON put there, and never so much that a model could go on with it for ever. A
schema may say something else in its ``x-guidance``; one within a grammar in Lark has to."""
_NOTHING_LEFT: Final = "no token of this model can follow"
_REASON_ENDS: Final = ("\n<backtrace>", "\n<state>", "\n<non-verbose/>")


class Constraint:
    """How far one answer has come in its grammar. One caller at a time, on any thread.

    Once it has failed it fails for ever.

    Args:
        matcher: of llguidance; it belongs to this from now on.
        vocabulary: tokens are below this.
        end_ids: tokens that end an answer.
        cpu_s: the CPU time of the thread that asks, in seconds.
    """

    __slots__ = ("_cpu_s", "_end_ids", "_left_s", "_matcher", "_num_past_end", "_vocabulary")

    def __init__(
        self, matcher: LLMatcher, vocabulary: int, end_ids: Collection[int], cpu_s: Callable[[], float]
    ) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._end_ids = frozenset(end_ids)
        self._cpu_s = cpu_s
        self._left_s = GRAMMAR_ANSWER_CPU_S
        self._num_past_end = 0  # end tokens behind an answer that nothing can follow: the matcher does not count them
        self._check()

    def allowed(self, num_logits: int) -> npt.NDArray[np.bool_]:
        """Which tokens may come next, [num_logits]; of an answer that is complete, the end tokens alone. At least one.

        Raises:
            InvalidRequest: to find out takes too much, or nothing in the vocabulary can go on.
        """
        with self._spending(GRAMMAR_DRAW_CPU_S):
            bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        allowed = np.zeros(num_logits, np.bool_)
        known = min(num_logits, self._vocabulary)
        allowed[:known] = np.unpackbits(bits, count=known, bitorder="little")
        if not allowed.any():
            raise _refused(_NOTHING_LEFT)
        return allowed

    def admits(self, token: int) -> bool:
        """Whether ``token`` may come next. A peer's word: one that may not changes nothing here.

        Raises:
            InvalidRequest: to find out takes too much.
        """
        if not 0 <= token < self._vocabulary:
            return False
        if self._matcher.is_stopped():
            return token in self._end_ids
        with self._spending(0.0):
            return self._matcher.validate_tokens([token]) == 1

    def accept(self, token: int) -> None:
        """Go on by one token.

        Raises:
            InvalidRequest: it may not come next, or to find out takes too much.
        """
        if not 0 <= token < self._vocabulary:
            raise _refused(f"token {token} is out of the vocabulary of {self._vocabulary}")
        if self._matcher.is_stopped() and token in self._end_ids:
            self._num_past_end += 1
            self._check()
            return
        with self._spending(GRAMMAR_TOKEN_CPU_S):
            self._matcher.consume_token(token)

    def take_back(self, count: int) -> None:
        """Forget the last ``count`` tokens.

        Raises:
            InvalidRequest: it has failed before.
        """
        past_end = min(count, self._num_past_end)
        self._num_past_end -= past_end
        if count > past_end:
            self._matcher.rollback(count - past_end)
        self._check()

    @contextmanager
    def _spending(self, more_s: float) -> Iterator[None]:
        """llguidance is at work; the answer may take so much more for it. Raises `InvalidRequest` where that is not enough."""
        began = self._cpu_s()
        yield
        if self._left_s >= 0.0:
            self._left_s += more_s - (self._cpu_s() - began)
        self._check()

    def _check(self) -> None:
        if self._left_s < 0.0:
            raise _refused("to follow it takes too long")
        if self._matcher.is_error():
            raise _refused(self._matcher.get_error())


class GrammarCompiler:
    """Makes constraints over one model's vocabulary. May be shared between threads.

    Args:
        tokens: the bytes of each token, by id; of a control token its text.
        control: ids of control tokens.
        end_ids: tokens that end an answer; at least one, or no answer could ever end.
        encode: the ids that the model's tokenizer gives for a text; raises nothing.
        trial: compiles a grammar elsewhere first, and raises `InvalidRequest` where that takes too much; None where all grammars are
            trusted.
        cpu_s: see `Constraint`; by default nothing takes any.
    """

    def __init__(
        self,
        tokens: Sequence[bytes],
        control: Collection[int],
        end_ids: Collection[int],
        encode: Callable[[str], list[int]],
        trial: Callable[[Grammar], None] | None = None,
        cpu_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        if not end_ids:
            raise ValueError("a vocabulary without an end token")
        self._tokens = tokens
        self._control = frozenset(control)
        self._end_ids = sorted(end_ids)
        self._encode = encode
        self._trial = trial
        self._cpu_s = cpu_s

    @classmethod
    def of(
        cls,
        tokenizer: Tokenizer,
        trial: Callable[[Grammar], None] | None = None,
        cpu_s: Callable[[], float] = lambda: 0.0,
    ) -> GrammarCompiler:
        """The compiler for a model's tokenizer. It reads 49,000 tokens in 0.04 s; the rest comes with the first grammar."""
        names = {token: text.encode() for text, token in tokenizer.control.items()}
        tokens = [names.get(token) or tokenizer.token_bytes(token) for token in range(tokenizer.vocabulary)]
        return cls(tokens, names, tokenizer.end_ids, tokenizer.encode, trial, cpu_s)

    def compile(self, grammar: Grammar, answer: Sequence[int] = ()) -> Constraint:
        """What an answer that begins with ``answer`` has to follow from there. Blocking: milliseconds; the first time half a second.

        Raises:
            InvalidRequest: it is no grammar, takes too much, or ``answer`` does not follow it; says why.
            Overloaded: the trial could not be held.
        """
        from llguidance import LLMatcher, LLParserLimits

        if self._trial is not None:
            self._trial(grammar)
        matcher = LLMatcher(self._vocabulary, _in_llguidance(grammar), log_level=0, limits=LLParserLimits(**_LIMITS))
        constraint = Constraint(matcher, len(self._tokens), self._end_ids, self._cpu_s)
        for token in answer:
            constraint.accept(token)
        return constraint

    @cached_property
    def _vocabulary(self) -> LLTokenizer:
        from llguidance import LLTokenizer, TokenizerWrapper

        source = _TokenSource(self._tokens, sorted(self._control | set(self._end_ids)), self._end_ids[0], self._encode)
        return LLTokenizer(TokenizerWrapper(source), eos_token=self._end_ids, slices=LLTokenizer.json_slices())


class _TokenSource:
    """A vocabulary in the words of llguidance; a special token's bytes begin with ff, which is in no text."""

    def __init__(
        self, tokens: Sequence[bytes], special: Collection[int], end: int, encode: Callable[[str], list[int]]
    ) -> None:
        self.tokens = list(tokens)
        for token in special:
            self.tokens[token] = b"\xff" + (tokens[token] or b"<%d>" % token)
        self.special_token_ids = list(special)
        self.eos_token_id = end
        self.bos_token_id = None
        self._encode = encode

    def __call__(self, text: str) -> list[int]:
        if not isinstance(text, str):  # llguidance asks with bytes first, to see what is taken
            raise TypeError("text is a str")
        return self._encode(text)


def _in_llguidance(grammar: Grammar) -> str:
    from llguidance import LLMatcher

    if grammar.kind == "lark":
        if grammar.text.lstrip().startswith("{"):  # llguidance would read it as its own JSON
            raise _refused("no grammar in Lark begins with a brace")
        return LLMatcher.grammar_from_lark(grammar.text)
    try:
        return LLMatcher.grammar_from_json_schema(grammar.text, defaults={"whitespace_pattern": JSON_WHITESPACE})
    except ValueError as error:
        raise _refused(str(error)) from None


def _refused(reason: str) -> InvalidRequest:
    for end in _REASON_ENDS:
        reason = reason.partition(end)[0]
    reason = reason.strip()
    if reason.startswith("panic:"):  # the rest of it is about the inside of llguidance
        reason = "llguidance failed over it"
    elif reason == "NoExtensionBias":
        reason = _NOTHING_LEFT
    return InvalidRequest(f"the grammar: {reason[:MAX_GRAMMAR_REASON_CHARS]}", "grammar")
