"""Addresses of HTTP APIs, as a peer may name them to others."""

from __future__ import annotations

from urllib.parse import urlsplit

from tessella_p2p.base.limits import MAX_ADDRESS_CHARS


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
