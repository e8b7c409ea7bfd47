"""The chat template of an artifact: from a conversation to the text that the model was trained to continue.

A template is a program that came with the weights, so it runs in `sandbox.BoundedEnvironment` and everything that it does wrong is
an `ArtifactError`. What it refuses on purpose (``raise_exception``: roles that do not alternate, and the like) is an `InvalidRequest`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from typing import Final

import jinja2

from tessella_p2p.base.errors import ArtifactError, InvalidRequest, PromptTooLong, TessellaError
from tessella_p2p.base.limits import MAX_PROMPT_CHARS, MAX_TEMPLATE_CHARS, MAX_TEMPLATE_WORK, TOOL_PROBE_WORK
from tessella_p2p.model.sandbox import BoundedEnvironment, OutOfBudget, Raised, render
from tessella_p2p.model.tool_calls import ToolCall, read_calls

_TEMPLATE_KEY = "tokenizer.chat_template"
_MAX_DATE_FORMAT_CHARS = 64
_PROBE_CALL: Final = ToolCall("probe_of_tools", {"probed": "it"}, "probe0000")
_PROBE_TOOL: Final[Mapping[str, object]] = {
    "type": "function",
    "function": {
        "name": _PROBE_CALL.name,
        "description": "",
        "parameters": {"type": "object", "properties": {"probed": {"type": "string"}}, "required": ["probed"]},
    },
}


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message of a conversation. ``role`` is system, user, assistant or tool.

    ``tool_calls`` are what an assistant asked for; ``call_id`` and ``name`` say which of them a tool's message answers.
    """

    role: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    call_id: str = ""
    name: str = ""

    def as_template_value(self) -> dict[str, object]:
        """What chat templates expect."""
        value: dict[str, object] = {"role": self.role, "content": self.content}
        if self.tool_calls:
            value["tool_calls"] = [call.as_template_value() for call in self.tool_calls]
        if self.call_id:
            value["tool_call_id"] = self.call_id
        return {**value, "name": self.name} if self.name else value


class ChatTemplate:
    """A compiled chat template. Immutable; safe to share between threads.

    Args:
        text: the template's source.
        tokens: texts of the tokens that it may name: ``bos_token``, ``eos_token``.
        source: the artifact's file name, for messages.

    Raises:
        ArtifactError: a source that is too long or no template, or that uses what chat templates have no business to.
    """

    def __init__(self, text: str, tokens: Mapping[str, str], source: str) -> None:
        if len(text) > MAX_TEMPLATE_CHARS:
            raise ArtifactError(
                f"{source}: a chat template of {len(text)} characters; {MAX_TEMPLATE_CHARS} are accepted"
            )
        self.text = text
        self._tokens = dict(tokens)
        self._source = source
        try:
            self._compiled = BoundedEnvironment().from_string(text)
        except jinja2.TemplateError as error:
            raise ArtifactError(f"{source}: the chat template cannot be used: {error}") from error
        except (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError) as error:  # Python's own compiler
            raise ArtifactError(f"{source}: the chat template is nested too deeply or no program") from error

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, object], source: str) -> ChatTemplate:
        """The template in a GGUF header.

        Raises:
            ArtifactError: there is none, or see the class.
        """
        text = metadata.get(_TEMPLATE_KEY)
        if not isinstance(text, str):
            raise ArtifactError(f"{source}: there is no chat template in it, so it takes raw prompts only")
        vocabulary = metadata.get("tokenizer.ggml.tokens")
        tokens: dict[str, str] = {}
        for name in ("bos", "eos"):
            token_id = metadata.get(f"tokenizer.ggml.{name}_token_id")
            if isinstance(vocabulary, tuple) and isinstance(token_id, int) and 0 <= token_id < len(vocabulary):
                tokens[f"{name}_token"] = str(vocabulary[token_id])
        return cls(text, tokens, source)

    @cached_property
    def shows_tools(self) -> bool:
        """Whether the model is shown tools, and writes its calls in the form of `tool_calls`: found out by rendering a probe."""
        asks = [ChatMessage("user", "?")]
        called = [*asks, ChatMessage("assistant", "", (_PROBE_CALL,))]
        try:
            shown = self.render(asks, now_ms=0, tools=(_PROBE_TOOL,), units=TOOL_PROBE_WORK)
            written = self.render(
                called, now_ms=0, tools=(_PROBE_TOOL,), add_generation_prompt=False, units=TOOL_PROBE_WORK
            )
        except TessellaError:  # it does not know them
            return False
        calls = [(call.name, dict(call.arguments)) for call in read_calls(written)]
        return _PROBE_CALL.name in shown and (_PROBE_CALL.name, dict(_PROBE_CALL.arguments)) in calls

    def render(
        self,
        messages: Sequence[ChatMessage],
        *,
        now_ms: int,
        tools: Sequence[Mapping[str, object]] = (),
        add_generation_prompt: bool = True,
        units: int = MAX_TEMPLATE_WORK,
    ) -> str:
        """The text of a conversation, as transformers' ``apply_chat_template`` gives it.

        The contents of the messages stand in it as they are, so tokenise it with care: see `chat.encode_chat`.

        Args:
            messages: the conversation.
            now_ms: the date (Unix milliseconds, UTC), for templates that write it.
            tools: OpenAI's tool objects, as `tool_calls.parse_tools` lets them pass.
            add_generation_prompt: whether it ends where the assistant is to answer.
            units: the work that it may cost.

        Raises:
            InvalidRequest: the template does not accept this conversation.
            PromptTooLong: the conversation alone is over `MAX_PROMPT_CHARS` characters.
            ArtifactError: the template failed, or wants more work than one may cost.
        """
        if sum(map(_num_chars, messages)) + (len(json.dumps(tools)) if tools else 0) > MAX_PROMPT_CHARS:
            raise PromptTooLong(f"the messages are over {MAX_PROMPT_CHARS} characters")

        def strftime_now(pattern: str) -> str:
            if len(pattern) > _MAX_DATE_FORMAT_CHARS:
                raise OutOfBudget(f"a date format of over {_MAX_DATE_FORMAT_CHARS} characters")
            return datetime.fromtimestamp(now_ms / 1000, UTC).strftime(pattern)

        variables = {
            **self._tokens,
            "messages": [message.as_template_value() for message in messages],
            "add_generation_prompt": add_generation_prompt,
            "tools": list(tools) or None,
            "documents": None,
            "strftime_now": strftime_now,
        }
        try:
            return render(self._compiled, variables, max_chars=2 * MAX_PROMPT_CHARS, units=units)
        except Raised as error:
            raise InvalidRequest(
                f"the model's chat template does not accept these messages: {error}", "messages"
            ) from error
        except Exception as error:  # a template is a program: it may raise anything, and none is this node's fault
            what = str(error)[:200] or type(error).__name__
            raise ArtifactError(f"{self._source}: the chat template failed: {what}") from error


def _num_chars(message: ChatMessage) -> int:
    calls = sum(len(call.name) + len(call.call_id) + len(json.dumps(call.arguments)) for call in message.tool_calls)
    return len(message.content) + len(message.call_id) + len(message.name) + calls
