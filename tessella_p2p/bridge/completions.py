"""``POST /v1/completions``: OpenAI's text completions, for prompts as they stand; pure.

Also the shape in which other routes answer that are like it: see `CompletionDialect`.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, NotRequired

from typing_extensions import TypedDict  # pydantic reads no other before Python 3.12

from tessella_p2p.bridge.answers import Extension, FinishReason, Usage, encoded, event, extension_of, usage_of
from tessella_p2p.bridge.choices import Answer, Reading, numbered
from tessella_p2p.bridge.openai_models.completions import CompletionRequest, Prompt, completion_request
from tessella_p2p.entry.api import Delta, Finished, Gap, GenerateRequest, Prepared, ScoredToken, TokenScores


class TextLogprobs(TypedDict):
    """The older form of logprobs: lists with one entry per token. Offsets are in characters of the choice's text."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class TextChoice(TypedDict):
    """One answer, or what a chunk adds to it; the reason is null until its last chunk."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: FinishReason | None


class TextCompletion(TypedDict):
    """A whole answer, or one event of a streamed one, which has ``usage`` only where it was asked for: null, and last the counts."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: NotRequired[Usage | None]
    tessella: NotRequired[Extension]


# ---- From the body to what the entry is asked ----


def read_completion(body: bytes, text_of: Callable[[Sequence[int]], str]) -> Reading:
    """Read a request for text completions; ``text_of`` gives the text of token ids.

    Raises:
        InvalidRequest: with the field at fault as ``param``.
    """
    asked = completion_request(body)
    n = asked.n or 1
    style = CompletionStyle(
        usage_chunk=asked.wants_usage_chunk(),
        extension=bool(asked.tessella),
        per_prompt=n,
        echoed=asked.prompts() if asked.echo else (),
        text_of=text_of,
    )
    return Reading(
        tuple(choice for prompt in asked.prompts() for choice in numbered(_request(asked, prompt), n)),
        bool(asked.stream),
        partial(CompletionDialect, style),
        {"prompt_ids": "prompt", "gap": "suffix"},
    )


def _request(asked: CompletionRequest, prompt: Prompt) -> GenerateRequest:
    request = replace(asked.asked_of(asked.model), max_tokens=asked.token_limit())
    if not isinstance(prompt, str):
        return replace(request, prompt_ids=prompt)
    if asked.suffix:
        return replace(request, gap=Gap(prompt, asked.suffix))
    return replace(request, prompt=prompt)


# ---- From what comes to the answer ----


@dataclass(frozen=True, slots=True)
class CompletionStyle:
    """How text completions are answered.

    Attributes:
        usage_chunk: the stream ends with the counts.
        extension: the answer has this node's extension.
        per_prompt: how many choices in a row have the same prompt.
        echoed: the prompts, where each choice begins with its own.
        text_of: gives the text of a prompt of token ids.
    """

    usage_chunk: bool = False
    extension: bool = False
    per_prompt: int = 1
    echoed: Sequence[Prompt] = ()
    text_of: Callable[[Sequence[int]], str] = lambda _: ""


class CompletionDialect:
    """Says the choices of a text completion."""

    def __init__(self, style: CompletionStyle, prepared: Prepared, created: int) -> None:
        self._style = style
        self._id = f"cmpl-{prepared.request_id}"
        self._model = prepared.model
        self._created = created
        self._offsets: dict[int, TextOffsets] = {}
        self._has_prompt: set[int] = set()

    def first(self, index: int) -> bytes:
        """Nothing opens a choice but its first chunk."""
        return b""

    def delta(self, index: int, delta: Delta) -> bytes:
        """The chunk with new text and its tokens' logprobs; tokens with neither are not worth one."""
        text = self._prompt_once(index) + delta.text
        if not text and not delta.scores:
            return b""
        logprobs = None
        if delta.scores:
            logprobs = text_logprobs(delta.scores, self._offsets.setdefault(index, TextOffsets()))
        return event(self._chunk(index, text, logprobs))

    def ended(self, index: int, finished: Finished) -> bytes:
        """The chunk with the reason."""
        closing = self._chunk(index, self._prompt_once(index), None, finished.reason)
        if self._style.extension:
            closing["tessella"] = extension_of(finished)
        return event(closing)

    def last(self, finished: Sequence[Finished]) -> bytes:
        """Where it was asked for, the usage without a choice."""
        if not self._style.usage_chunk:
            return b""
        usage: TextCompletion = {**self._object([]), "usage": usage_of(finished, self._style.per_prompt)}
        return event(usage)

    def whole(self, answers: Sequence[Answer]) -> bytes:
        """The answer in one piece."""
        choices: list[TextChoice] = [
            {
                "index": index,
                "text": self._echo(index) + answer.text,
                "logprobs": text_logprobs(answer.scores, TextOffsets()) if answer.scores else None,
                "finish_reason": answer.finished.reason,
            }
            for index, answer in enumerate(answers)
        ]
        finished = [answer.finished for answer in answers]
        completion = self._object(choices)
        completion["usage"] = usage_of(finished, self._style.per_prompt)
        if self._style.extension:
            completion["tessella"] = extension_of(*finished)
        return encoded(completion)

    def _prompt_once(self, index: int) -> str:
        """The prompt, before a streamed choice's first text, where it is echoed."""
        if not self._style.echoed or index in self._has_prompt:
            return ""
        self._has_prompt.add(index)
        return self._echo(index)

    def _echo(self, index: int) -> str:
        if not self._style.echoed:
            return ""
        prompt = self._style.echoed[index // self._style.per_prompt]
        return prompt if isinstance(prompt, str) else self._style.text_of(prompt)

    def _chunk(
        self, index: int, text: str, logprobs: TextLogprobs | None = None, reason: FinishReason | None = None
    ) -> TextCompletion:
        chunk = self._object([{"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}])
        if self._style.usage_chunk:
            chunk["usage"] = None
        return chunk

    def _object(self, choices: list[TextChoice]) -> TextCompletion:
        return {
            "id": self._id,
            "object": "text_completion",
            "created": self._created,
            "model": self._model,
            "choices": choices,
        }


class TextOffsets:
    """Where each token of an answer begins in its text: at the character that its first byte is a part of."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_chars = 0

    def next(self, token: bytes) -> int:
        """The offset of the next token, in characters."""
        offset = self._num_chars
        self._num_chars += len(self._decoder.decode(token))
        return offset


def text_logprobs(scores: Sequence[TokenScores], offsets: TextOffsets) -> TextLogprobs:
    """The older form of some tokens' logprobs.

    An entry of ``top_logprobs`` has the token itself beside the likeliest ones; of tokens with the same text, the likelier.
    """
    return {
        "tokens": [_legacy_text(each.chosen) for each in scores],
        "token_logprobs": [each.chosen.logprob for each in scores],
        "top_logprobs": [_by_text(each) for each in scores],
        "text_offset": [offsets.next(each.chosen.token) for each in scores],
    }


def _by_text(scores: TokenScores) -> dict[str, float]:
    found: dict[str, float] = {}
    for each in sorted((scores.chosen, *scores.top), key=lambda scored: -scored.logprob):
        found.setdefault(_legacy_text(each), each.logprob)
    return found


def _legacy_text(scored: ScoredToken) -> str:
    """A token's text, or its bytes as OpenAI's older models write those that are no whole character."""
    try:
        return scored.token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in scored.token)
