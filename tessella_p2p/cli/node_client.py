"""A running node's HTTP surface, as the commands ask it."""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from ipaddress import ip_address
from typing import Any

import httpx

from tessella_p2p.base.errors import (
    ConfigurationError,
    MalformedMessage,
    NoRoute,
    StreamReset,
    TessellaError,
    TransportError,
    error_from_code,
)
from tessella_p2p.base.limits import MIB

MAX_ANSWER_BYTES = 16 * MIB
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
TIMEOUT = httpx.Timeout(120.0, connect=10.0)
"""The longest silence; a stream has a comment far more often."""


class NodeClient:
    """One node's HTTP API. Use as a context manager.

    Args:
        api_url: ``http://HOST:PORT``.
        transport: in place of the network.
        bearer: a token that every request carries; it goes to this machine, or over HTTPS.

    Raises:
        ConfigurationError: ``api_url`` is no URL, or would show the token to the network.
    """

    def __init__(
        self, api_url: str, transport: httpx.BaseTransport | None = None, *, bearer: str | None = None
    ) -> None:
        self._api_url = checked_url(api_url, bearer)
        self._client = httpx.Client(
            base_url=self._api_url,
            headers=bearer_headers(bearer),
            timeout=TIMEOUT,
            transport=transport,
            trust_env=may_use_proxies(self._api_url),
        )

    def __enter__(self) -> NodeClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def get(self, path: str, **parameters: str) -> Any:
        """The JSON that the node answers.

        Raises:
            TransportError: nobody answers there.
            MalformedMessage: the answer is too long, or no JSON.
            TessellaError: what the node refused with.
        """
        with told_errors(self._api_url), self._client.stream("GET", path, params=parameters) as answer:
            return _json_of(answer)

    def post(self, path: str, body: Mapping[str, object]) -> Any:
        """The JSON that is answered to ``body``.

        Raises:
            TessellaError: as `get`.
        """
        with told_errors(self._api_url), self._client.stream("POST", path, json=body) as answer:
            return _json_of(answer)

    def model_id(self) -> str:
        """The first model that the node can answer with now.

        Raises:
            NoRoute: there is none.
        """
        body = self.get("/v1/models")
        try:
            return str(body["data"][0]["id"])
        except (KeyError, TypeError, IndexError) as error:
            raise NoRoute(
                f"the node at {self._api_url} has no complete route for any model now; `tessella-p2p peers` shows who is there"
            ) from error

    def events(self, path: str, body: Mapping[str, object]) -> Generator[Mapping[str, Any], None, None]:
        """Post ``body`` and give each event of the streamed answer; closing the iterator ends the request at the node.

        Raises:
            StreamReset: the stream ended before its end was said.
            MalformedMessage: an event is too long, or no JSON.
            TessellaError: as `get`, and what ended the answer in its middle.
        """
        with told_errors(self._api_url), self._client.stream("POST", path, json=body) as answer:
            if answer.status_code != httpx.codes.OK:
                _json_of(answer)
            reader = DataReader(answer)
            for part in answer.iter_bytes():
                for data in reader.feed(part):
                    if data == DONE:
                        return
                    yield event_of(data.decode(errors="replace"))
        raise StreamReset("the node's answer ended before it was complete; ask again")


def checked_url(api_url: str, bearer: str | None) -> str:
    """``api_url`` without a slash at its end, and without the ``/v1`` that OpenAI's clients have there.

    Raises:
        ConfigurationError: it is no URL, or would show the token ``bearer`` to the network, or that is no token.
    """
    check_token(bearer)
    try:
        url = httpx.URL(api_url)
    except httpx.InvalidURL as error:
        raise ConfigurationError(f"--api-url {api_url!r}: {error}") from error
    if url.scheme not in ("http", "https") or not url.host:
        raise ConfigurationError(f"--api-url {api_url!r}: http://HOST:PORT is expected")
    if bearer is not None and url.scheme == "http" and not _is_local(url.host):
        raise ConfigurationError(f"{api_url}: a token is not sent unencrypted; use https, or a tunnel to this machine")
    return api_url.rstrip("/").removesuffix("/v1")


def check_token(bearer: str | None) -> None:
    """Refuse what no header carries: a line of a file with its end, say, or letters beyond ASCII.

    Raises:
        ConfigurationError: never shows the token.
    """
    if bearer is not None and not (bearer.isascii() and bearer.isprintable() and bearer):
        raise ConfigurationError("the token holds what no header can: letters, digits and signs of ASCII are expected")


def may_use_proxies(api_url: str) -> bool:
    """Whether the environment's proxies are for ``api_url``: not for this machine, whose tokens one would see in the clear."""
    return not _is_local(httpx.URL(api_url).host)


def bearer_headers(bearer: str | None) -> dict[str, str]:
    """What a client with the token ``bearer`` sends with every request."""
    return {} if bearer is None else {"authorization": f"Bearer {bearer}"}


@contextmanager
def told_errors(api_url: str) -> Iterator[None]:
    """Errors of the connection to ``api_url``, as this project's own."""
    try:
        yield
    except httpx.ConnectError as error:
        raise TransportError(
            f"no node answers at {api_url} ({error}): start one with `tessella-p2p daemon`, "
            "or name another with -a URL before the subcommand"
        ) from error
    except httpx.TimeoutException as error:
        raise TransportError(f"the node at {api_url} did not answer in time") from error
    except httpx.TransportError as error:
        raise StreamReset(f"the connection to {api_url} broke: {error}") from error


def _is_local(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def _json_of(answer: httpx.Response) -> Any:
    content = bytearray()
    for part in answer.iter_bytes():
        content += part
        check_length(answer, len(content))
    return parsed_answer(answer, bytes(content))


DONE = b"[DONE]"
"""The data of a stream's last event."""


class DataReader:
    """The data of server-sent events, a line each, out of a stream's parts; a line that never ends is refused."""

    def __init__(self, answer: httpx.Response) -> None:
        self._answer = answer
        self._pending = bytearray()

    def feed(self, part: bytes) -> Iterator[bytes]:
        """What ``part`` completes; blank lines and comments are left out.

        Raises:
            MalformedMessage: the line that is left is longer than any answer.
        """
        self._pending += part
        if b"\n" in part:  # else a long line in small parts would be copied once a part
            *whole, self._pending = self._pending.split(b"\n")
            for line in whole:
                if line.startswith(b"data:"):
                    yield bytes(line.removeprefix(b"data:").strip())
        check_length(self._answer, len(self._pending))


def check_length(answer: httpx.Response, num_bytes: int) -> None:
    """Refuse what is longer than any answer of a node.

    Raises:
        MalformedMessage: it is.
    """
    if num_bytes > MAX_ANSWER_BYTES:
        raise MalformedMessage(f"{answer.url} answers with over {MAX_ANSWER_BYTES // MIB} MiB")


def parsed_answer(answer: httpx.Response, content: bytes) -> Any:
    """The JSON of a whole answer.

    Raises:
        MalformedMessage: it is none.
        TessellaError: what the node refused with.
    """
    try:
        body = _parsed(content.decode(errors="replace"))
    except (ValueError, RecursionError) as error:
        raise MalformedMessage(
            f"{answer.url} answers with status {answer.status_code} and no JSON: is it a Tessella node?"
        ) from error
    if answer.status_code != httpx.codes.OK:
        raise _refusal(body)
    return body


def _parsed(text: str) -> Any:
    """JSON, with U+FFFD for an escaped half of a surrogate pair: as it is it could be shown, saved and sent nowhere."""
    value = json.loads(text)
    if not _SURROGATE.search(text):
        return value
    utf16 = json.dumps(value, ensure_ascii=False).encode("utf-16", "surrogatepass")
    return json.loads(utf16.decode("utf-16", "replace"))


def event_of(data: str) -> dict[str, Any]:
    """One event of a stream.

    Raises:
        MalformedMessage: it is no JSON object.
        TessellaError: what ended the stream, if that is what it says.
    """
    try:
        event = _parsed(data)
    except (ValueError, RecursionError) as error:
        raise MalformedMessage("an event of the node's stream is no JSON") from error
    if not isinstance(event, dict):
        raise MalformedMessage("an event of the node's stream is no JSON object")
    if "error" in event:
        raise _refusal(event)
    return event


def _refusal(body: object) -> TessellaError:
    error = body.get("error") if isinstance(body, dict) else None
    if not isinstance(error, dict):
        return MalformedMessage("the node refused, and did not say why")
    return error_from_code(str(error.get("code")), str(error.get("message")))
