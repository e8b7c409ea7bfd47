"""Conversations: what clients send, checked, and how they become token ids without a message posing as another one.

**Forgery.** A template writes control tokens (``<|im_end|>``) around each message; a message may hold the same characters. If the
rendered text were tokenised as it stands, a user could end its own turn and write the system's. So `encode_chat` finds out which
characters the template wrote: it renders the conversation a second time, with every character of a message that occurs in any
control token replaced by a private stand-in. A control token that is still whole in that text was written by the template; all
other text is tokenised as plain text, after the stand-ins are turned back. For honest messages this gives the ids of the plain
rendering, exactly.

Tools and the arguments of calls are data of the same origin, and are veiled likewise; only texts in them that are one word stay as
they are: a template may have to read them (``type: object``), and a control token has other characters beside.

A template may look into a message (cut off a part before ``</think>``, say), and then the two renderings may differ. Then the plain
one counts, provided it has the same control tokens in the same order; otherwise the conversation is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Final

from tessella_p2p.base.errors import InvalidRequest, PromptTooLong
from tessella_p2p.base.limits import MAX_CHAT_MESSAGES
from tessella_p2p.model.template import ChatMessage, ChatTemplate
from tessella_p2p.model.tokenizer import Tokenizer, match_any
from tessella_p2p.model.tool_calls import ToolCall, parse_calls

_ROLES: Final[Mapping[str, str]] = {
    "system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool",
}  # fmt: skip
"""Roles that clients may name, and what templates call them. Free text here would be another way to forge a turn."""
_PRIVATE: Final = range(0x100000, 0x10FFFE)
"""Unicode's last private-use plane: no character of it means anything to a template."""
_WORD: Final = re.compile(r"[A-Za-z0-9_]*")


def parse_messages(messages: Sequence[Mapping[str, object]]) -> list[ChatMessage]:
    """The conversation in an OpenAI request's ``messages``.

    A content is text, a list of text parts (joined by line breaks) or null (an empty message).

    Raises:
        InvalidRequest: no messages or too many, an unknown role, a part that is no text, no tool call; names the field.
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
    for field in ("function_call", "audio"):
        if message.get(field):
            raise InvalidRequest(f"{field} is not supported", f"{where}.{field}")
    calls = parse_calls(message.get("tool_calls"), f"{where}.tool_calls")
    if calls and role != "assistant":
        raise InvalidRequest("only an assistant calls tools", f"{where}.tool_calls")
    content = _parse_content(message.get("content"), f"{where}.content")
    if role != "tool":
        return ChatMessage(_ROLES[role], content, calls)
    call_id, name = (_parse_text(message, field, where) for field in ("tool_call_id", "name"))
    return ChatMessage("tool", content, call_id=call_id, name=name)


def _parse_text(message: Mapping[str, object], field: str, where: str) -> str:
    text = message.get(field) or ""
    if not isinstance(text, str):
        raise InvalidRequest(f"{field} is text", f"{where}.{field}")
    return text


def _parse_content(content: object, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise InvalidRequest("a content is text, a list of parts or null", where)
    return "\n".join(_parse_part(part, f"{where}[{i}]") for i, part in enumerate(content))


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
    tools: Sequence[Mapping[str, object]] = (),
) -> list[int]:
    """The token ids that ask the model for the next message. Control tokens are the template's alone.

    Args:
        tokenizer: the model's.
        template: the model's.
        messages: the conversation.
        now_ms: the date, for templates that write it.
        max_ids: a conversation that gives more is refused, where possible before it is tokenised.
        tools: what the model may ask to have called, as `tool_calls.parse_tools` lets them pass.

    Raises:
        InvalidRequest: the template does not accept the conversation, knows no tools, or cannot keep its control tokens apart from
            a message's.
        PromptTooLong: over ``max_ids`` tokens.
        ArtifactError: the template failed.
    """
    if (tools or any(message.tool_calls for message in messages)) and not template.shows_tools:
        raise InvalidRequest("this model's chat template knows no tools", "tools" if tools else "messages")
    ids: list[int] = []
    for piece in _own_pieces(template, _Conversation(messages, tools), now_ms, tokenizer.control):
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


@dataclass(frozen=True, slots=True)
class _Conversation:
    """All that a template is given that somebody else wrote."""

    messages: Sequence[ChatMessage]
    tools: Sequence[Mapping[str, object]]

    def rendered(self, template: ChatTemplate, now_ms: int) -> str:
        return template.render(self.messages, now_ms=now_ms, tools=self.tools)

    def characters(self) -> set[str]:
        return set().union(
            *(text for message in self.messages for text in (message.content, message.call_id, message.name)),
            *_texts([call.as_template_value() for message in self.messages for call in message.tool_calls]),
            *_texts(list(self.tools)),
        )

    def veiled(self, veil: _Veil) -> _Conversation:
        return _Conversation(
            [
                replace(
                    message,
                    content=message.content.translate(veil.stand_ins),
                    tool_calls=tuple(
                        ToolCall(veil.text(call.name), veil.mapping(call.arguments), veil.text(call.call_id))
                        for call in message.tool_calls
                    ),
                    call_id=veil.text(message.call_id),
                    name=veil.text(message.name),
                )
                for message in self.messages
            ],
            [veil.mapping(tool) for tool in self.tools],
        )


@dataclass(frozen=True, slots=True)
class _Veil:
    """Hides the characters of control tokens in data. ``stand_ins`` is for `str.translate`."""

    stand_ins: Mapping[int, str]
    spares_words: bool
    """No control token is made of words alone, so that words of the data may stay."""

    def text(self, text: str) -> str:
        return text if self.spares_words and _WORD.fullmatch(text) else text.translate(self.stand_ins)

    def mapping(self, value: Mapping[str, object]) -> dict[str, object]:
        return {self.text(name): self._value(inner) for name, inner in value.items()}

    def _value(self, value: object) -> object:
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return self.mapping(value)
        return [self._value(inner) for inner in value] if isinstance(value, list | tuple) else value


def _texts(value: object) -> Iterator[str]:
    """Every text in a JSON value, the names in it included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield str(name)
            yield from _texts(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _texts(inner)


def _own_pieces(
    template: ChatTemplate, conversation: _Conversation, now_ms: int, control: Mapping[str, int]
) -> Iterator[_Piece]:
    plain = conversation.rendered(template, now_ms)
    stand_ins = _stand_ins(set("".join(control)), template.text, conversation)
    veil = _Veil(stand_ins, spares_words=not any(map(_WORD.fullmatch, control)))
    veiled = conversation.veiled(veil).rendered(template, now_ms)
    originals = {ord(stand_in): char for char, stand_in in stand_ins.items()}
    if veiled.translate(originals) == plain:
        return _split(veiled, control, originals)
    pattern = match_any(control)
    if pattern.findall(veiled) != pattern.findall(plain):
        raise InvalidRequest(
            "a message holds the model's control tokens where its chat template acts on them", "messages"
        )
    return _split(plain, control, {})


def _stand_ins(guarded: set[str], template_text: str, conversation: _Conversation) -> dict[int, str]:
    """A private character for each of ``guarded``, for `str.translate`; none that anybody uses already."""
    used = set(template_text) | conversation.characters()
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
