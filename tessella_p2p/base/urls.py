"""Addresses of HTTP APIs, as a peer may name them to others, and origins of web pages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final
from urllib.parse import urlsplit

from tessella_p2p.base.limits import MAX_ADDRESS_CHARS

DEFAULT_PORTS: Final[Mapping[str, str]] = {"http": ":80", "https": ":443"}
"""What browsers leave out of an origin, and clients out of ``Host``, by scheme."""
EVERY_ORIGIN: Final = "*"


def check_http_url(url: str) -> None:
    """Whether clients may be sent to ``url``: ``http`` or ``https``, a host, no user, no query, printable ASCII.

    Raises:
        ValueError: says what is wrong with it.
    """
    if len(url) > MAX_ADDRESS_CHARS or not url.isascii() or not url.isprintable() or " " in url:
        raise ValueError(f"a URL is printable ASCII of at most {MAX_ADDRESS_CHARS} characters")
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("a URL of an API begins with http:// or https:// and a host")
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise ValueError("a URL of an API has no user, no query and no fragment")
    if parts.port == 0:  # reading it raises ValueError for what is no port
        raise ValueError("0 is no port")


def check_origin(text: str) -> str:
    """An origin as browsers write it, or ``*``.

    Raises:
        ValueError: it is none: ``http://HOST[:PORT]`` in lower case, without the scheme's own port and without a path.
    """
    if text == EVERY_ORIGIN:
        return text
    parts = urlsplit(text)
    written = f"{parts.scheme}://{parts.netloc}"
    is_name = not any(sign in parts.netloc for sign in "@*")
    if parts.scheme not in DEFAULT_PORTS or not parts.hostname or not is_name or text != written:
        raise ValueError(
            "an origin is http://HOST or https://HOST, with a port where it has one and without a path; or *"
        )
    if text != text.lower() or not text.isascii() or not text.isprintable() or " " in text:
        raise ValueError("an origin is in lower case, and a name in it that is not ASCII is written as xn--…")
    if parts.netloc.endswith(DEFAULT_PORTS[parts.scheme]):
        raise ValueError("browsers leave the scheme's own port out of an origin: leave it out here, too")
    return text
