"""One question to a node: what is posted in each mode, and what the events of the answer say; pure but for `ask`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, Literal

from tessella_p2p.base.errors import MalformedMessage
from tessella_p2p.cli.node_client import NodeClient

Mode = Literal["chat", "completion", "fim"]


@dataclass(frozen=True, slots=True)
class Manner:
    """How answers are drawn: at most so many tokens, at this temperature (0 is greedy)."""

    max_tokens: int
    temperature: float


@dataclass(frozen=True, slots=True)
class Turn:
    """One message of a conversation."""

    role: Literal["system", "user", "assistant"]
    content: str


@dataclass(frozen=True, slots=True)
class Question:
    """What is posted, and where."""

    path: str
    body: Mapping[str, object]


@dataclass(slots=True)
class Answer:
    """What has come of an answer so far.

    Attributes:
        text: as it was shown.
        reason: ``stop`` or ``length``; None until the end is there.
        usage: OpenAI's counts of tokens, as the node gave them.
        report: the node's ``tessella`` object: route, times, how it was paid.
    """

    text: str = ""
    reason: str | None = None
    usage: Mapping[str, Any] = field(default_factory=dict)
    report: Mapping[str, Any] = field(default_factory=dict)


def chat_question(model: str, turns: Sequence[Turn], manner: Manner) -> Question:
    """A conversation, through the model's chat template."""
    messages = [{"role": turn.role, "content": turn.content} for turn in turns]
    usage = {"stream_options": {"include_usage": True}}
    return Question("/v1/chat/completions", {**_common(model, manner), **usage, "messages": messages})


def completion_question(model: str, prompt: str | Sequence[int], manner: Manner) -> Question:
    """A text as it stands, or token ids, to be gone on with."""
    given = {"prompt": prompt} if isinstance(prompt, str) else {"prompt_ids": list(prompt)}
    return Question("/v1/generate", {**_common(model, manner), **given})


def fim_question(model: str, prefix: str, suffix: str, manner: Manner) -> Question:
    """What is missing between two texts."""
    usage = {"stream_options": {"include_usage": True}}
    return Question("/v1/fim/completions", {**_common(model, manner), **usage, "prefix": prefix, "suffix": suffix})


def _common(model: str, manner: Manner) -> dict[str, object]:
    return {
        "model": model,
        "max_tokens": manner.max_tokens,
        "temperature": manner.temperature,
        "stream": True,
        "tessella": True,
    }


def ask(node: NodeClient, question: Question, answer: Answer, show: Callable[[str], None]) -> None:
    """Post a question, and put what comes into ``answer``, piece by piece; leaving it ends the request at the node.

    Args:
        node: who is asked.
        question: what.
        answer: a new one; where this is left early, it holds what came until then.
        show: is given each piece of text.

    Raises:
        TessellaError: see `NodeClient.events`.
        KeyboardInterrupt: the user's; the connection is closed, so the generation is over on every stage.
    """
    with closing(node.events(question.path, question.body)) as events:
        for event in events:
            piece = take(event, answer)
            if piece:
                show(piece)


def take(event: Mapping[str, Any], answer: Answer) -> str:
    """Put one event into ``answer``; its text.

    Raises:
        MalformedMessage: it is no event of an answer.
    """
    try:
        piece, ended = _text_of(event)
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise MalformedMessage(
            "an event of the node's stream is no chunk of an answer: is it a Tessella node?"
        ) from error
    usage, report = event.get("usage"), event.get("tessella")
    answer.text += piece
    answer.reason = ended or answer.reason
    answer.usage = usage if isinstance(usage, dict) else answer.usage
    answer.report = report if isinstance(report, dict) else answer.report
    return piece


def _text_of(event: Mapping[str, Any]) -> tuple[str, str | None]:
    """Text and reason of a chunk of any route: a chat's has a delta, others a text, the manual's own no choices around it."""
    if "choices" not in event:
        return str(event["text"]), event.get("finish_reason")
    if not event["choices"]:
        return "", None  # the chunk of the usage
    choice = event["choices"][0]
    text = choice["delta"].get("content") if "delta" in choice else choice["text"]
    return str(text or ""), choice.get("finish_reason")
