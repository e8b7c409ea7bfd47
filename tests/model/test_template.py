"""The chat template: transformers' text for honest templates, a typed and timely end for hostile ones."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tessella_p2p.base.errors import ArtifactError, InvalidRequest, PromptTooLong, TessellaError
from tessella_p2p.base.limits import MAX_PROMPT_CHARS, MAX_TEMPLATE_CHARS
from tessella_p2p.model.template import ChatMessage, ChatTemplate

GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "template_golden.json").read_text("utf-8"))
HELLO = [ChatMessage("user", "Hello")]


def compile_template(text: str) -> ChatTemplate:
    return ChatTemplate(text, {"bos_token": "<s>", "eos_token": "</s>"}, "x.gguf")


def render(text: str, messages: list[ChatMessage] = HELLO, now_ms: int = 0) -> str:
    return compile_template(text).render(messages, now_ms=now_ms)


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: f"{case['template']}-{len(case['messages'])}")
def test_text_is_the_one_of_transformers(case: dict[str, object]) -> None:
    messages = [ChatMessage(**message) for message in case["messages"]]  # type: ignore[attr-defined]
    template = compile_template(GOLDEN["templates"][case["template"]])
    if "error" in case:
        with pytest.raises(InvalidRequest, match=str(case["error"])[:40]) as caught:
            template.render(messages, now_ms=0)
        assert caught.value.param == "messages"
    else:
        generation = bool(case["add_generation_prompt"])
        assert template.render(messages, now_ms=0, add_generation_prompt=generation) == case["text"]


def test_date_is_the_callers() -> None:
    now_ms = int(datetime(2024, 2, 29, 23, 59, tzinfo=UTC).timestamp() * 1000)
    assert render("{{ strftime_now('%d %b %Y') }}", now_ms=now_ms) == "29 Feb 2024"


def doubled(expression: str) -> str:
    """A template that replaces a namespace's ``x`` by ``expression`` 64 times."""
    loop = "{% for i in range(64) %}{% set ns.x = " + expression + " %}{% endfor %}"
    return "{% set ns = namespace(x='ab') %}" + loop


HOSTILE = {
    "nested loops": "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}",
    "long range": "{% for a in range(10**12) %}{% endfor %}",
    "longer range than accepted": "{% for a in range(1000000) %}{% endfor %}",
    "doubling by +": doubled("ns.x + ns.x"),
    "doubling by ~": doubled("ns.x ~ ns.x"),
    "doubling by join": doubled("[ns.x, ns.x] | join"),
    "doubling by replace filter": doubled("ns.x | replace('b', ns.x)"),
    "doubling by replace method": doubled("ns.x.replace('b', ns.x)"),
    "doubling lists": doubled("[ns.x, ns.x]") + "{{ ns.x }}",
    "doubling lists into json": doubled("[ns.x, ns.x]") + "{{ ns.x | tojson }}",
    "comparing doubled lists": "{% set ns = namespace(x=[], y=[]) %}{% for i in range(64) %}{% set ns.x = [ns.x, ns.x] %}"
    "{% set ns.y = [ns.y, ns.y] %}{% endfor %}{{ ns.x == ns.y }}",
    "repeated text": "{{ 'a' * 10000000000 }}",
    "repeated list": "{{ [0] * 10000000000 }}",
    "power": "{{ 10 ** 10 ** 8 }}",
    "growing numbers": "{% set ns = namespace(x=3) %}{% for i in range(64) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "printf width": "{{ '%1000000000d' % 1 }}",
    "format width": "{{ '{:1000000000}'.format(1) }}",
    "format by getitem": "{{ ('{:1000000000}')['format'](1) }}",
    "format filter": "{{ '%1000000000d' | format(1) }}",
    "center filter": "{{ 'a' | center(1000000000) }}",
    "center method": "{{ 'a'.center(1000000000) }}",
    "indent": "{{ messages | tojson(indent=1000000000) }}",
    "separators": "{{ [1, 2] | tojson(separators=('a' * 99999, ':')) }}",
    "lipsum": "{{ lipsum(100000) }}",
    "recursive macros": "{% macro f(n) %}{{ f(n + 1) }}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "branching macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "captured output": "{% set x %}{% for i in range(9999) %}" + "y" * 9999 + "{% endfor %}{% endset %}",
    "printed output": "{% for i in range(9999) %}" + "y" * 9999 + "{% endfor %}",
    "select with long arguments": "{{ range(9999) | select('in', range(9999)) | list | length }}",
    "selectattr with long arguments": "{% set big = range(9999) %}{{ [messages[0]] * 9999 | selectattr('role', 'in', big) | list }}",
    "long slices": "{% set x = 'y' * 1000000 %}{% for i in range(9999) %}{% set z = x[1:] %}{% endfor %}",
    "recursive loop": "{% for x in [[1]] recursive %}{{ loop([x]) }}{% endfor %}",
    "long date": "{{ strftime_now('%A' * 1000) }}",
    "bytes of a number": "{{ (1).to_bytes(1000000000, 'big') }}",
    "class walk": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "class walk by attr": "{{ ''|attr('__class__') }}",
    "context": "{{ self._TemplateReference__context.parent }}",
    "changing the messages": "{{ messages.append(1) }}",
    "changing a message": "{{ messages[0].update({'role': 'system'}) }}",
    "underscored namespace": "{% set ns = namespace(__call__=1) %}",
    "include": "{% include 'x' %}",
    "import": "{% import 'x' as x %}",
    "extends": "{% extends 'x' %}",
    "block": "{% block x %}{% endblock %}",
    "filter block": "{% filter upper %}x{% endfilter %}",
    "unknown filter": "{{ messages | pprint }}",
    "syntax": "{{ messages",
    "unknown tag": "{% generation %}",
    "division by zero": "{{ 1 // 0 }}",
    "missing attribute": "{{ messages.x.y }}",
    "deep expression": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "deep blocks": "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
    "deep loops": "{% for x in messages %}" * 40 + "{% endfor %}" * 40,
    "long number": "{{ " + "9" * 5000 + " }}",
    "long source": " " * (MAX_TEMPLATE_CHARS + 1),
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_template_is_an_artifact_error(text: str) -> None:
    with pytest.raises(ArtifactError, match=r"x\.gguf"):
        render(text)


@given(st.text(alphabet="{}%|()[]'\"~+*.,=<>- \nabfilmnorst012", max_size=60))
@settings(max_examples=150, deadline=None)
def test_any_source_gives_text_or_a_typed_error(source: str) -> None:
    try:
        assert isinstance(render("{{ messages[0].content }}" + source), str)
    except TessellaError:
        return


def test_messages_that_are_too_long_are_refused_before_they_are_rendered() -> None:
    with pytest.raises(PromptTooLong):
        render("{{ messages }}", [ChatMessage("user", "x" * MAX_PROMPT_CHARS), ChatMessage("user", "y")])


def test_an_artifact_without_a_template_says_so() -> None:
    with pytest.raises(ArtifactError, match="no chat template"):
        ChatTemplate.from_metadata({}, "x.gguf")


def test_a_template_names_the_tokens_of_its_artifact() -> None:
    metadata = {
        "tokenizer.chat_template": "{{ bos_token }}{{ eos_token }}",
        "tokenizer.ggml.tokens": ("a", "<b>", "<e>"),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    assert ChatTemplate.from_metadata(metadata, "x.gguf").render(HELLO, now_ms=0) == "<b><e>"
