"""Conversations: what clients send, checked, and how they become token ids without a message posing as another one.

**Forgery.** A template writes control tokens (``<|im_end|>``) around each message; a message may hold the same characters. If the
rendered text were tokenised as it stands, a user could end its own turn and write the system's. So `encode_chat` finds out which
characters the template wrote: it renders the conversation a second time, with every character of a message that occurs in any
control token replaced by a private stand-in. A control token that is still whole in that text was written by the template; all
other text is tokenised as plain text, after the stand-ins are turned back. For honest messages this gives the ids of the plain
rendering, exactly.

A template may look into a message (cut off a part before ``</think>``, say), and then the two renderings may differ. Then the plain
one counts, provided it has the same control tokens in the same order; otherwise the conversation is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Final

from tessella_p2p.base.errors import InvalidRequest, PromptTooLong
from tessella_p2p.base.limits import MAX_CHAT_MESSAGES
from tessella_p2p.model.template import ChatMessage, ChatTemplate
from tessella_p2p.model.tokenizer import Tokenizer, match_any

_ROLES: Final[Mapping[str, str]] = {
    "system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool",
}  # fmt: skip
"""Roles that clients may name, and what templates call them. Free text here would be another way to forge a turn."""
_PRIVATE: Final = range(0x100000, 0x10FFFE)
"""Unicode's last private-use plane: no character of it means anything to a template."""


def parse_messages(messages: Sequence[Mapping[str, object]]) -> list[ChatMessage]:
    """The conversation in an OpenAI request's ``messages``.

    A content is text, a list of text parts (joined by line breaks) or null (an empty message).

    Raises:
        InvalidRequest: no messages or too many, an unknown role, a part that is no text, a tool call; names the field.
    """
    if not 0 < len(messages) <= MAX_CHAT_MESSAGES:
        raise InvalidRequest(f"{len(messages)} messages; 1 to {MAX_CHAT_MESSAGES} are accepted", "messages")
    return [_parse_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _parse_message(message: Mapping[str, object], where: str) -> ChatMessage:
    if not isinstance(message, Mapping):
        raise InvalidRequest("a message is an object", where)
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise InvalidRequest(f"a role is one of {', '.join(_ROLES)}", f"{where}.role")
    for field in ("tool_calls", "function_call", "audio"):
        if message.get(field):
            raise InvalidRequest(f"{field} are not supported by this model's template", f"{where}.{field}")
    content = message.get("content")
    if content is None:
        return ChatMessage(_ROLES[role], "")
    if isinstance(content, str):
        return ChatMessage(_ROLES[role], content)
    if not isinstance(content, list | tuple):
        raise InvalidRequest("a content is text, a list of parts or null", f"{where}.content")
    parts = [_parse_part(part, f"{where}.content[{i}]") for i, part in enumerate(content)]
    return ChatMessage(_ROLES[role], "\n".join(parts))


def _parse_part(part: object, where: str) -> str:
    if not isinstance(part, Mapping) or part.get("type") != "text":
        raise InvalidRequest("only parts of type text are supported", where)
    text = part.get("text")
    if not isinstance(text, str):
        raise InvalidRequest("a text part has a text", f"{where}.text")
    return text


def encode_chat(
    tokenizer: Tokenizer,
    template: ChatTemplate,
    messages: Sequence[ChatMessage],
    *,
    now_ms: int,
    max_ids: int | None = None,
) -> list[int]:
    """The token ids that ask the model for the next message. Control tokens are the template's alone.

    Args:
        tokenizer: the model's.
        template: the model's.
        messages: the conversation.
        now_ms: the date, for templates that write it.
        max_ids: a conversation that gives more is refused, where possible before it is tokenised.

    Raises:
        InvalidRequest: the template does not accept the conversation, or cannot keep its control tokens apart from a message's.
        PromptTooLong: over ``max_ids`` tokens.
        ArtifactError: the template failed.
    """
    ids: list[int] = []
    for piece in _own_pieces(template, messages, now_ms, tokenizer.control):
        if piece.token_id is None:
            left = None if max_ids is None else max_ids - len(ids)
            ids += tokenizer.encode(piece.text, max_ids=left)
        else:
            ids.append(piece.token_id)
        if max_ids is not None and len(ids) > max_ids:
            raise PromptTooLong(f"the messages are over {max_ids} tokens with the model's chat template")
    return ids


@dataclass(frozen=True, slots=True)
class _Piece:
    """Plain text, or a control token that the template wrote."""

    text: str
    token_id: int | None = None


def _own_pieces(
    template: ChatTemplate, messages: Sequence[ChatMessage], now_ms: int, control: Mapping[str, int]
) -> Iterator[_Piece]:
    plain = template.render(messages, now_ms=now_ms)
    stand_ins = _stand_ins(set("".join(control)), template.text, messages)
    veiled_messages = [replace(message, content=message.content.translate(stand_ins)) for message in messages]
    veiled = template.render(veiled_messages, now_ms=now_ms)
    originals = {ord(stand_in): char for char, stand_in in stand_ins.items()}
    if veiled.translate(originals) == plain:
        return _split(veiled, control, originals)
    pattern = match_any(control)
    if pattern.findall(veiled) != pattern.findall(plain):
        raise InvalidRequest(
            "a message holds the model's control tokens where its chat template acts on them", "messages"
        )
    return _split(plain, control, {})


def _stand_ins(guarded: set[str], template_text: str, messages: Sequence[ChatMessage]) -> dict[int, str]:
    """A private character for each of ``guarded``, for `str.translate`; none that anybody uses already."""
    used = set(template_text).union(*(message.content for message in messages))
    free = list(islice((char for char in map(chr, _PRIVATE) if char not in used), len(guarded)))
    if len(free) < len(guarded):
        raise InvalidRequest("the messages use every character of Unicode's last private-use plane", "messages")
    return {ord(char): stand_in for char, stand_in in zip(sorted(guarded), free, strict=True)}


def _split(text: str, control: Mapping[str, int], originals: Mapping[int, int]) -> Iterator[_Piece]:
    start = 0
    for match in match_any(control).finditer(text):
        yield _Piece(text[start : match.start()].translate(originals))
        yield _Piece(match.group(), control[match.group()])
        start = match.end()
    yield _Piece(text[start:].translate(originals))
