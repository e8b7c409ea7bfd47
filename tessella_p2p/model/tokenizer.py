"""Text to token ids and back, from the metadata of an artifact alone: no weights, no network, no second file.

Byte-level BPE (GPT-2's, ``tokenizer.ggml.model = gpt2``). How a text is cut into words before the merges is not in the file, only
its name is (``tokenizer.ggml.pre``), and a wrong one gives ids that look right and are not. So each name in `_PRE_TOKENIZERS` was
compared with an implementation that is not ours, and every other name is refused.

Control tokens (``<|im_start|>`` and its like) are found in a text by this module, never by the BPE library, and only where the caller
asks for it: what a user wrote must not become one.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from typing import Final

import tokenizers
from tokenizers import models, pre_tokenizers

from tessella_p2p.base.errors import ArtifactError, InvalidRequest, InvalidStep, NotCertified, PromptTooLong
from tessella_p2p.base.limits import MAX_PROMPT_CHARS, MAX_TOKEN_CHARS, MAX_VOCABULARY
from tessella_p2p.model.gap_tokens import GapTokens, find_gap_tokens


class TokenKind(IntEnum):
    """What a token is; the values are GGUF's ``tokenizer.ggml.token_type``."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def _smollm() -> pre_tokenizers.PreTokenizer:
    """Each digit for itself, then GPT-2's words."""
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )


_PRE_TOKENIZERS: Final[Mapping[str, Callable[[], pre_tokenizers.PreTokenizer]]] = {"smollm": _smollm}
CERTIFIED_PRE_TOKENIZERS: Final = tuple(_PRE_TOKENIZERS)

_CERTIFIED_KINDS: Final = frozenset(
    {TokenKind.NORMAL, TokenKind.UNKNOWN, TokenKind.CONTROL, TokenKind.USER_DEFINED, TokenKind.UNUSED}
)
_END_KEYS: Final = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
_END_NAMES: Final = frozenset(
    {
        "<|im_end|>",
        "<|endoftext|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end|>",
        "<|end_of_text|>",
        "<end_of_turn>",
        "<EOT>",
        "</s>",
    }
)
"""Control tokens that end an answer whatever the metadata call them, as llama.cpp treats them."""


class Tokenizer:
    """One model's vocabulary. Immutable; safe to share between threads.

    Attributes:
        vocabulary: how many ids there are.
        control: id of each control token, by its text.
        end_ids: tokens that end an answer.
        bos_id, eos_id: the ids that the metadata name, or None.
        adds_bos: whether a raw prompt begins with `bos_id`; a chat template writes its own.
        gap: the tokens for fill-in-the-middle, or None; each of them is a control token, whatever type the file gives it.
    """

    __slots__ = (
        "_bpe", "_control_or_defined", "_defined", "_defined_pattern", "_every_pattern", "_kinds", "_longest", "_tokens",
        "adds_bos", "bos_id", "control", "end_ids", "eos_id", "gap", "vocabulary",
    )  # fmt: skip

    def __init__(self, data: _Vocabulary) -> None:
        self._bpe = _build_bpe(data)
        _check_alphabet(data)
        self.vocabulary = len(data.tokens)
        self._tokens, self._kinds = data.tokens, data.kinds
        self._longest = max(map(len, data.tokens))  # each character of a text is at least one of some token
        special = [(i, kind) for i, kind in enumerate(data.kinds) if kind != TokenKind.NORMAL and data.tokens[i]]
        self.control: Mapping[str, int] = {data.tokens[i]: i for i, kind in special if kind == TokenKind.CONTROL}
        self._defined = {data.tokens[i]: i for i, kind in special if kind == TokenKind.USER_DEFINED}
        self._control_or_defined = {**self._defined, **self.control}
        self._defined_pattern = match_any(self._defined)
        self._every_pattern = match_any(self._control_or_defined)
        self.bos_id = data.bos_id
        self.eos_id = data.eos_id
        self.adds_bos = data.adds_bos
        self.gap = data.gap
        self.end_ids = data.end_ids | {i for token, i in self.control.items() if token in _END_NAMES}
        if data.gap is not None:
            self.end_ids |= data.gap.end_ids

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, object], source: str) -> Tokenizer:
        """The tokenizer that a GGUF header describes. About 0.1 s for 50,000 tokens.

        Args:
            metadata: the header's key/value pairs.
            source: the file's name, for messages.

        Raises:
            NotCertified: a model or a pre-tokenizer that no test certifies.
            ArtifactError: metadata that are missing or do not fit together.
        """
        return cls(_read_vocabulary(metadata, source))

    def encode(self, text: str, *, parse_special: bool = False, max_ids: int | None = None) -> list[int]:
        """The ids of ``text``. A byte that the vocabulary has no token for gives none, as in the tokenizers library.

        Args:
            text: any text.
            parse_special: whether the control tokens whose text occurs in it are meant as such. Never for what a user wrote.
            max_ids: a text that cannot possibly fit into so many is refused by its length, before any work.

        Raises:
            InvalidRequest: ``text`` holds half a surrogate pair, which no encoding has.
            PromptTooLong: over `MAX_PROMPT_CHARS` characters, or too long for ``max_ids``.
        """
        most_chars = MAX_PROMPT_CHARS if max_ids is None else min(MAX_PROMPT_CHARS, max_ids * self._longest)
        if len(text) > most_chars:
            raise PromptTooLong(f"a prompt of {len(text)} characters; {most_chars} are accepted")
        if not _is_unicode(text):
            raise InvalidRequest("the text holds half a surrogate pair, which is no character", "prompt")
        pattern = self._every_pattern if parse_special else self._defined_pattern
        ids: list[int] = []
        start = 0
        for match in pattern.finditer(text):
            ids += self._encode_plain(text[start : match.start()])
            ids.append(self._control_or_defined[match.group()])
            start = match.end()
        return ids + self._encode_plain(text[start:])

    def encode_prompt(self, text: str, *, max_ids: int | None = None) -> list[int]:
        """The ids of a raw prompt, behind the beginning-of-sequence token where the model wants one.

        Control tokens are parsed: whoever writes a raw prompt writes the whole of it, so there is nobody to impersonate.

        Raises:
            InvalidRequest, PromptTooLong: see `encode`.
        """
        ids = self.encode(text, parse_special=True, max_ids=max_ids)
        return [self.bos_id, *ids] if self.adds_bos and self.bos_id is not None else ids

    def encode_gap(self, prefix: str, suffix: str, *, max_ids: int | None = None) -> list[int]:
        """The ids that ask for what is missing between two texts, in the order prefix, suffix, middle; see `gap_tokens`.

        The two are text: the name of a control token in them stays one.

        Raises:
            InvalidRequest: the model has no tokens for it, or see `encode`.
            PromptTooLong: see `encode`.
        """
        if self.gap is None:
            raise InvalidRequest(
                "this model has no fill-in-the-middle tokens: it fills no gap and takes no suffix", "suffix"
            )
        before, after = (self.encode(text, max_ids=max_ids) for text in (prefix, suffix))
        ids = [self.gap.prefix, *before, self.gap.suffix, *after, self.gap.middle]
        return [self.bos_id, *ids] if self.adds_bos and self.bos_id is not None else ids

    def _encode_plain(self, text: str) -> list[int]:
        return list(self._bpe.encode(text, add_special_tokens=False).ids) if text else []

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for: part of a character, or several; none for a control token.

        Raises:
            InvalidStep: no such id (a tail sends ids, so this is a peer's fault).
        """
        if not 0 <= token_id < self.vocabulary:
            raise InvalidStep(f"token id {token_id} is not in a vocabulary of {self.vocabulary}")
        token, kind = self._tokens[token_id], self._kinds[token_id]
        if kind == TokenKind.NORMAL:
            return token.translate(_byte_table()).encode("latin-1")
        return token.encode("utf-8") if kind == TokenKind.USER_DEFINED else b""

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ``ids``, without control tokens; bytes that are no UTF-8 become U+FFFD."""
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")


class IncrementalDecoder:
    """Turns tokens into text as they come. A character whose bytes are spread over tokens comes out once, whole.

    Args:
        tokenizer: whose tokens these are.
    """

    __slots__ = ("_decoder", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """The text that is certain after one more token; often empty.

        Raises:
            InvalidStep: an id outside of the vocabulary.
        """
        return self._decoder.decode(self._tokenizer.token_bytes(token_id))

    def flush(self) -> str:
        """What is left at the end: empty, or U+FFFD for a character that was cut off. The decoder may be used again after it."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest


def match_any(texts: Iterable[str]) -> re.Pattern[str]:
    """A pattern that finds any of ``texts``, of two at one place the longer; with no texts it finds nothing."""
    longest_first = sorted((text for text in texts if text), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def _is_unicode(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


# ---- From metadata ----


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """What the metadata say, checked."""

    source: str
    pre: str
    tokens: tuple[str, ...]
    kinds: tuple[int, ...]
    merges: list[tuple[str, str]]
    bos_id: int | None
    eos_id: int | None
    end_ids: frozenset[int]
    adds_bos: bool
    gap: GapTokens | None


def _read_vocabulary(metadata: Mapping[str, object], source: str) -> _Vocabulary:
    model, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if model != "gpt2":
        raise NotCertified(f"{source}: tokenizer model {model!r} is not certified; certified: 'gpt2'")
    if not isinstance(pre, str) or pre not in _PRE_TOKENIZERS:
        certified = ", ".join(CERTIFIED_PRE_TOKENIZERS)
        raise NotCertified(f"{source}: pre-tokenizer {pre!r} is not certified; certified: {certified}")
    if metadata.get("tokenizer.ggml.add_space_prefix", False) is not False:
        raise NotCertified(f"{source}: tokenizer.ggml.add_space_prefix is not certified")
    tokens = _strings(metadata, "tokenizer.ggml.tokens", source)
    if not 0 < len(tokens) <= MAX_VOCABULARY or len(set(tokens)) != len(tokens):
        raise ArtifactError(f"{source}: a vocabulary of {len(tokens)} tokens, some of them twice, or too many")
    if max(map(len, tokens)) > MAX_TOKEN_CHARS:
        raise ArtifactError(f"{source}: a token of over {MAX_TOKEN_CHARS} characters")
    kinds = metadata.get("tokenizer.ggml.token_type")
    if not isinstance(kinds, tuple) or len(kinds) != len(tokens) or not all(isinstance(kind, int) for kind in kinds):
        raise ArtifactError(f"{source}: tokenizer.ggml.token_type is not one number for each of {len(tokens)} tokens")
    named = {key: _token_id(metadata, key, len(tokens), source) for key in (*_END_KEYS, "tokenizer.ggml.bos_token_id")}
    special = {token: i for i, token in enumerate(tokens) if kinds[i] != TokenKind.NORMAL}
    gap = find_gap_tokens(metadata, special, len(tokens), source)
    control = gap.all_ids if gap is not None else frozenset()
    return _Vocabulary(
        source=source,
        pre=pre,
        tokens=tokens,
        kinds=tuple(TokenKind.CONTROL if i in control else kind for i, kind in enumerate(kinds)) if control else kinds,
        merges=_merges(metadata, source),
        bos_id=named["tokenizer.ggml.bos_token_id"],
        eos_id=named["tokenizer.ggml.eos_token_id"],
        end_ids=frozenset(i for i in (named[key] for key in _END_KEYS) if i is not None),
        adds_bos=metadata.get("tokenizer.ggml.add_bos_token", False) is True,
        gap=gap,
    )


def _strings(metadata: Mapping[str, object], key: str, source: str) -> tuple[str, ...]:
    value = metadata.get(key)
    if not isinstance(value, tuple) or not all(isinstance(item, str) for item in value):
        raise ArtifactError(f"{source}: {key} is missing or no list of strings")
    return value


def _token_id(metadata: Mapping[str, object], key: str, vocabulary: int, source: str) -> int | None:
    value = metadata.get(key)
    if value is None:
        return None
    if not isinstance(value, int) or not 0 <= value < vocabulary:
        raise ArtifactError(f"{source}: {key} = {value!r} is no token of a vocabulary of {vocabulary}")
    return value


def _merges(metadata: Mapping[str, object], source: str) -> list[tuple[str, str]]:
    pairs = [merge.partition(" ") for merge in _strings(metadata, "tokenizer.ggml.merges", source)]
    if len(pairs) > MAX_VOCABULARY:
        raise ArtifactError(f"{source}: {len(pairs)} merges; {MAX_VOCABULARY} are accepted")
    return [(left, right) for left, _, right in pairs]


def _build_bpe(data: _Vocabulary) -> tokenizers.Tokenizer:
    vocabulary = {token: i for i, token in enumerate(data.tokens)}
    try:
        bpe = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=data.merges))
    except Exception as error:  # the library raises bare Exception, for a merge of unknown tokens and the like
        raise ArtifactError(f"{data.source}: the tokenizer cannot be built: {error}") from error
    bpe.pre_tokenizer = _PRE_TOKENIZERS[data.pre]()
    return bpe


@lru_cache(maxsize=1)
def _byte_alphabet() -> Mapping[str, int]:
    """GPT-2's printable stand-in for each byte, as the byte-level vocabulary writes it."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


@lru_cache(maxsize=1)
def _byte_table() -> dict[int, int]:
    """For `str.translate`: from a stand-in's code point to that of its byte."""
    return {ord(char): byte for char, byte in _byte_alphabet().items()}


def _check_alphabet(data: _Vocabulary) -> None:
    """Every token is of a kind that this module knows, and a normal one is written in the byte alphabet."""
    unknown = set(data.kinds) - _CERTIFIED_KINDS
    if unknown:
        raise NotCertified(f"{data.source}: tokens of the types {sorted(unknown)}, which no test certifies")
    normal = (token for token, kind in zip(data.tokens, data.kinds, strict=True) if kind == TokenKind.NORMAL)
    if not _byte_alphabet().keys() >= set("".join(normal)):
        raise ArtifactError(f"{data.source}: a token is not written in the byte alphabet")
