"""Structured logs on standard error: for people on a terminal, as JSON lines elsewhere; never a prompt, a key or a tensor.

Every line passes `redact`, whoever logged it: fields are kept only if their value is of a plain type, bytes and tensors become their
size, and fields whose name says that they hold content or secrets become their length.
"""

from __future__ import annotations

import enum
import logging
import sys
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from pathlib import PurePath
from typing import Any, Final, TextIO

import structlog

from tessella_p2p.base.ids import LayerRange

SECRET_FIELDS: Final = frozenset(
    {
        # secrets
        *(
            "api_key",
            "authorization",
            "digest_key",
            "hf_token",
            "key",
            "password",
            "private_key",
            "psk",
            "secret",
            "seed",
            "token",
        ),
        # what people ask and what the model answers
        *(
            "answer",
            "body",
            "chunk",
            "completion",
            "content",
            "delta",
            "input",
            "messages",
            "output",
            "prompt",
            "prompts",
            "text",
        ),
        *("prompt_ids", "stop", "token_id", "token_ids", "tokens"),
        *("arguments", "embedding", "grammar", "schema", "suffix", "tool_calls", "tools"),
        # what travels between stages
        *("activation", "activations", "frame", "hidden", "hidden_states", "logits", "payload", "tensor"),
    }
)
"""Fields of which only the size is logged; numbers pass, since ``tokens=5`` is a count."""

MAX_TEXT_CHARS = 2048
"""Of a value: what is longer is cut, so that no page of text gets in under another name."""
_MAX_DEPTH = 4
_MAX_ITEMS = 64
_OWN: Final = frozenset({"event", "level", "logger", "timestamp", "exception", "stack"})
"""Fields that structlog itself writes."""


def redact(_logger: object, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """A structlog processor: keys, prompts and tensors out, their sizes in."""
    for name, value in event.items():
        if name.startswith("_") or name in ("exc_info", "exception", "stack"):
            continue
        event[name] = _shown(value, _MAX_DEPTH) if name in _OWN else _field(name, value, _MAX_DEPTH)
    return event


def _field(name: object, value: object, depth: int) -> object:
    if isinstance(name, str) and name.lower() in SECRET_FIELDS and not _is_number(value):
        return _size(value)
    return _shown(value, depth)


def _is_number(value: object) -> bool:
    return value is None or isinstance(value, bool | int | float)


def _size(value: object) -> str:
    if isinstance(value, str):
        return f"<{len(value)} characters>"
    if isinstance(value, bytes | bytearray | memoryview):
        return f"<{memoryview(value).nbytes} bytes>"
    if isinstance(value, list | tuple | set | frozenset | Mapping):
        return f"<{len(value)} items>"
    return f"<{type(value).__name__}>"


def _shown(value: object, depth: int) -> object:
    if isinstance(value, str):
        return value if len(value) <= MAX_TEXT_CHARS else f"{value[:MAX_TEXT_CHARS]}… <{len(value)} characters>"
    if isinstance(value, enum.Enum):
        return value.name
    if _is_number(value):
        return value
    if isinstance(value, PurePath | LayerRange):
        return str(value)
    if isinstance(value, BaseException):
        return _shown(f"{type(value).__name__}: {value}", depth)
    return _shown_items(value, depth) or _shown_tensor(value) or _size(value)


def _shown_items(value: object, depth: int) -> object | None:
    """The items of a small collection, each redacted; None where it is no such thing."""
    if depth > 0 and isinstance(value, Mapping) and len(value) <= _MAX_ITEMS:
        return {str(name): _field(name, item, depth - 1) for name, item in value.items()}
    if depth > 0 and isinstance(value, list | tuple | set | frozenset) and len(value) <= _MAX_ITEMS:
        return [_shown(item, depth - 1) for item in value]
    return None


def _shown_tensor(value: object) -> str | None:
    if isinstance(value, bytes | bytearray | memoryview):
        return _size(value)
    shape = getattr(value, "shape", None)
    if isinstance(shape, tuple):  # numpy's and torch's alike
        return f"<{type(value).__name__} {list(shape)} {getattr(value, 'dtype', '')}>"
    return None


class _RedactArguments(logging.Filter):
    """Libraries log with ``%s``: bytes and tensors among the arguments become their size before the text is made."""

    def filter(self, record: logging.LogRecord) -> bool:
        if isinstance(record.args, tuple):
            record.args = tuple(_shown_tensor(item) or item for item in record.args)
        return True


def configure_logging(level: str = "info", form: str = "auto", stream: TextIO | None = None) -> None:
    """Send every log line of this process to one stream; call it once, before anything logs.

    Our own loggers speak at ``level``; those of libraries at warning, through the same processors.

    Args:
        level: debug, info, warning or error.
        form: ``console``, ``json``, or ``auto``: console if the stream is a terminal.
        stream: standard error by default.
    """
    out = sys.stderr if stream is None else stream
    console = form == "console" or (form == "auto" and out.isatty())
    shared: list[structlog.types.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.stdlib.PositionalArgumentsFormatter(),
    ]
    last: list[structlog.types.Processor]
    if console:
        # rich's tracebacks would show local variables: prompts and tensors
        last = [structlog.dev.ConsoleRenderer(colors=out.isatty(), exception_formatter=structlog.dev.plain_traceback)]
    else:
        last = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(ensure_ascii=False)]
    handler = logging.StreamHandler(out)
    handler.addFilter(_RedactArguments())
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, redact, *last],
        )
    )
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    set_log_level(level)
    logging.captureWarnings(True)
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
    )


def set_log_level(level: str) -> None:
    """Let our own loggers speak at ``level`` from now on."""
    logging.getLogger("tessella_p2p").setLevel(level.upper())


@contextmanager
def unlogged() -> Iterator[None]:
    """Drop what is logged meanwhile, by whomever: for commands whose own words say what failed."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)
