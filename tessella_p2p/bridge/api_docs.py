"""The OpenAPI document as a page to be read; pure. No script, no font, nothing from elsewhere: one HTML file with its style in it."""

from __future__ import annotations

import base64
import hashlib
import re
from html import escape
from typing import Any, Final

Json = dict[str, Any]
_STYLE: Final = """
:root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif }
body { max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
code { font-family: ui-monospace, monospace; font-size: 0.92em; overflow-wrap: anywhere }
section { border-top: 1px solid color-mix(in srgb, currentColor 25%, transparent); padding: 0.5rem 0 }
table { border-collapse: collapse; width: 100% }
td { padding: 0.15rem 0.8rem 0.15rem 0; vertical-align: top }
td:first-child { white-space: nowrap }
h3 code { font-size: 1.05em }
.note { opacity: 0.75 }
"""
CONTENT_SECURITY_POLICY: Final = (
    "default-src 'none'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'; style-src 'sha256-"
    + base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode("ascii")
    + "'"
)
"""Allows the page's own style, by its hash, and nothing else."""
_TITLES: Final = {
    "openai": "OpenAI's",
    "text": "The node's own, and editors'",
    "node": "The node and its mesh",
    "public": "Public",
    "signed": "Signed by a peer",
    "operator": "Operator, with the admin token",
    "moved": "Over libp2p instead",
}


def docs_page(document: Json) -> str:
    """``document`` as HTML."""
    info = document["info"]
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(info['title'])}</title><style>{_STYLE}</style></head><body>",
        f"<h1>{escape(info['title'])} <small>{escape(info['version'])}</small></h1><p>{_marked(info['description'])}</p>",
    ]
    for tag, title in _TITLES.items():
        operations = [
            _operation(method, path, operation)
            for path, by_method in document["paths"].items()
            for method, operation in by_method.items()
            if tag in operation["tags"]
        ]
        if operations:
            parts += [f"<h2>{title}</h2>", *operations]
    parts.append("<h2>Bodies</h2>")
    parts += [_schema(name, schema) for name, schema in document["components"]["schemas"].items()]
    return "".join([*parts, "</body></html>"])


def _operation(method: str, path: str, operation: Json) -> str:
    rows = [
        (parameter["name"], _type_of(parameter["schema"]), "required" if parameter["required"] else "optional")
        for parameter in operation.get("parameters", ())
    ]
    body = operation.get("requestBody", {})
    said = [_marked(operation["summary"])]
    if "description" in operation:
        said.append(_marked(operation["description"]))
    for media_type, content in body.get("content", {}).items():
        said.append(f"Body: <code>{escape(media_type)}</code> {_marked(body.get('description', ''))}")
        required = content["schema"].get("required", ())
        rows += [
            (name, _type_of(schema), "required" if name in required else "optional")
            for name, schema in content["schema"].get("properties", {}).items()
        ]
    answers = [
        (status, _answer_of(answer), _marked(answer["description"]))
        for status, answer in operation["responses"].items()
    ]
    return (
        f"<section><h3><code>{method.upper()} {escape(path)}</code></h3>"
        + "".join(f"<p>{text}</p>" for text in said)
        + _table([(f"<code>{escape(name)}</code>", kind, note) for name, kind, note in rows])
        + _table([(f"<code>{status}</code>", kind, text) for status, kind, text in answers])
        + "</section>"
    )


def _schema(name: str, schema: Json) -> str:
    required = schema.get("required", ())
    rows = [
        (f"<code>{escape(field)}</code>", _type_of(kind), "" if field in required else "optional")
        for field, kind in schema.get("properties", {}).items()
    ]
    said = _marked(schema.get("description", ""))
    return f'<section id="{escape(name)}"><h3><code>{escape(name)}</code></h3><p>{said}</p>{_table(rows)}</section>'


def _table(rows: list[tuple[str, str, str]]) -> str:
    if not rows:
        return ""
    cells = (f'<tr><td>{a}</td><td>{b}</td><td class="note">{c}</td></tr>' for a, b, c in rows)
    return f"<table>{''.join(cells)}</table>"


def _answer_of(answer: Json) -> str:
    return ", ".join(_type_of(content["schema"]) for content in answer.get("content", {}).values())


def _type_of(schema: Json) -> str:
    """A schema in a few words."""
    if "$ref" in schema:
        name = escape(schema["$ref"].rpartition("/")[2])
        return f'<a href="#{name}">{name}</a>'
    if "anyOf" in schema:
        return " or ".join(_type_of(kind) for kind in schema["anyOf"])
    if "enum" in schema:
        return " or ".join(f"<code>{escape(str(word))}</code>" for word in schema["enum"])
    if "prefixItems" in schema:
        return f"[{', '.join(_type_of(kind) for kind in schema['prefixItems'])}]"
    if schema.get("type") == "array":
        return f"list of {_type_of(schema['items'])}" if "items" in schema else "list"
    words = [escape(str(schema.get("type", "")))]
    if "minimum" in schema and schema.get("maximum") is not None:
        words.append(f"{schema['minimum']} to {schema['maximum']}")
    if "description" in schema:
        words.append(f"({_marked(schema['description'])})")
    return " ".join(words)


def _marked(text: str) -> str:
    """``text`` with its code spans and paragraphs marked up."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text)).replace("\n\n", "<br>")
