"""A small artifact that can do what the pulled model cannot: fill gaps, and be shown tools. Its weights are random, its text is not.

Any stage can load it, so a mesh of it answers like one of a real model: a llama of 3 layers with a byte-level vocabulary of 272 ids.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tessella_p2p.model.tokenizer import TokenKind
from tests.model.tiny_gguf import build, tiny_llama

CONTROL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|fim_prefix|>",
    "<|fim_suffix|>",
    "<|fim_middle|>",
    "<|fim_pad|>",
)
MERGES = ("Ġ t", "h e", "Ġt he", "i n", "r e", "o n", "Ġ a", "e r", "d e")
CONTEXT_LENGTH = 2048
MODEL_ID = "tiny-fim"

TOOL_TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' }}{{- tool | tojson }}
    {%- endfor %}
    {{- '\\n</tools>\\nCall one as <tool_call>{"name": ..., "arguments": ...}</tool_call>.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
"""In the manner of Qwen 2.5."""


def tokens() -> tuple[str, ...]:
    """The vocabulary: every byte, the merges, the control tokens."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    stand_ins = [chr(256 + i) for i in range(256 - len(printable))]
    merged = [merge.replace(" ", "") for merge in MERGES]
    return (*map(chr, printable), *stand_ins, *merged, *CONTROL)


def text_metadata() -> dict[str, object]:
    """The part of a header that tokenizers and templates are made of; without FIM keys: the tokens' names say it."""
    names = tokens()
    kinds = tuple(int(TokenKind.CONTROL if name in CONTROL else TokenKind.NORMAL) for name in names)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": names,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.eos_token_id": names.index("<|im_end|>"),
        "tokenizer.ggml.bos_token_id": names.index("<|endoftext|>"),
        "tokenizer.chat_template": TOOL_TEMPLATE,
    }


def write_fim_artifact(folder: Path, *, metadata: Mapping[str, object] | None = None) -> Path:
    """The artifact in a file of about 1 MB."""
    header = {"llama.context_length": CONTEXT_LENGTH, **text_metadata(), **(metadata or {})}
    path = folder / f"{MODEL_ID}.gguf"
    path.write_bytes(build(*tiny_llama(metadata=header, vocabulary=len(tokens()))))
    return path
