"""Tools in a conversation: what a client offers, how a model writes that it wants one called, and which templates do both; pure.

Models differ in how they write a call. One form is understood here, that of the Hermes and Qwen families, which most small models
with tools were trained on: ``<tool_call>``, an object with ``name`` and ``arguments``, ``</tool_call>``. A template counts as one with
tools when it shows them to the model *and* itself writes an earlier call in this form: then the model does so too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from pydantic_core import from_json

from tessella_p2p.base.errors import InvalidRequest
from tessella_p2p.base.limits import MAX_TOOL_CALLS, MAX_TOOL_DEPTH, MAX_TOOLS

CALL_BEGIN: Final = "<tool_call>"
CALL_END: Final = "</tool_call>"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that an assistant asked for. ``arguments`` is a JSON object; ``call_id`` is how its result refers to it."""

    name: str
    arguments: Mapping[str, object]
    call_id: str = ""

    def as_template_value(self) -> dict[str, object]:
        """What chat templates expect: OpenAI's object, but with arguments that are an object and no text."""
        return {
            "id": self.call_id,
            "type": "function",
            "function": {"name": self.name, "arguments": self.arguments},
        }


def read_call(text: str) -> ToolCall | None:
    """The call in what a model wrote between `CALL_BEGIN` and `CALL_END`; None where that is none."""
    call = _json(text.strip())
    if not isinstance(call, Mapping):
        return None
    name, arguments = call.get("name"), call.get("arguments", {})
    if isinstance(arguments, str):
        arguments = _json(arguments)
    return ToolCall(name, arguments) if isinstance(name, str) and name and isinstance(arguments, Mapping) else None


def read_calls(text: str) -> list[ToolCall]:
    """Every call that a text holds, in their order; what stands between the marks and is no call is left out."""
    pieces = [piece.partition(CALL_END) for piece in text.split(CALL_BEGIN)[1:]]
    return [call for inside, end, _ in pieces if end and (call := read_call(inside)) is not None]


def parse_tools(tools: Sequence[Mapping[str, object]]) -> tuple[Mapping[str, object], ...]:
    """The tools of an OpenAI request, checked as far as a template relies on it.

    Raises:
        InvalidRequest: too many, too deep, no function, or one without a name; names the field.
    """
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest(f"{len(tools)} tools; {MAX_TOOLS} are accepted", "tools")
    for i, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or tool.get("type", "function") != "function":
            raise InvalidRequest("only tools of type function are supported", f"tools[{i}]")
        if not isinstance(function.get("name"), str) or not function["name"]:
            raise InvalidRequest("a function has a name", f"tools[{i}].function.name")
        check_depth(tool, f"tools[{i}]")
    return tuple(tools)


def parse_calls(calls: object, where: str) -> tuple[ToolCall, ...]:
    """The calls of an earlier answer, from an OpenAI message's ``tool_calls``; null has none.

    Raises:
        InvalidRequest: they are of no such form; names the field.
    """
    if not isinstance(calls, list | tuple | None):
        raise InvalidRequest("tool_calls are a list", where)
    if calls is None:
        return ()
    if len(calls) > MAX_TOOL_CALLS:
        raise InvalidRequest(f"{len(calls)} tool calls; {MAX_TOOL_CALLS} are accepted", where)
    return tuple(_parse_call(call, f"{where}[{i}]") for i, call in enumerate(calls))


def _parse_call(call: object, where: str) -> ToolCall:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping) or call.get("type", "function") != "function":
        raise InvalidRequest("a tool call is an object with a function", where)
    name, text, call_id = function.get("name"), function.get("arguments"), call.get("id", "")
    if not isinstance(name, str) or not name:
        raise InvalidRequest("a called function has a name", f"{where}.function.name")
    if not isinstance(call_id, str):
        raise InvalidRequest("the id of a call is text", f"{where}.id")
    arguments = _json(text) if isinstance(text, str) else text
    if not isinstance(arguments, Mapping):
        raise InvalidRequest("arguments are the text of a JSON object", f"{where}.function.arguments")
    check_depth(arguments, f"{where}.function.arguments")
    return ToolCall(name, arguments, call_id)


def check_depth(value: object, where: str) -> None:
    """Refuse what is nested more deeply than a template may have to follow. Raises `InvalidRequest`."""
    level: list[object] = [value]
    for _ in range(MAX_TOOL_DEPTH):
        level = [inner for outer in level for inner in _inside(outer)]
        if not level:
            return
    raise InvalidRequest(f"nested over {MAX_TOOL_DEPTH} levels deep", where)


def _inside(value: object) -> Iterable[object]:
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, list | tuple) else ()


def _json(text: str) -> object:
    """A JSON value; None of what is none."""
    try:
        return from_json(text, allow_inf_nan=False)
    except ValueError:
        return None
