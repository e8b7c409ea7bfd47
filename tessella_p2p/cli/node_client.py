"""A running node's HTTP surface, as the commands ask it."""

from __future__ import annotations

import json
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
_CONNECT_S = 10.0
_READ_S = 120.0
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
        self._api_url = api_url.rstrip("/")
        try:
            url = httpx.URL(self._api_url)
        except httpx.InvalidURL as error:
            raise ConfigurationError(f"--api-url {api_url!r}: {error}") from error
        if url.scheme not in ("http", "https") or not url.host:
            raise ConfigurationError(f"--api-url {api_url!r}: http://HOST:PORT is expected")
        if bearer is not None and url.scheme == "http" and not _is_local(url.host):
            raise ConfigurationError(
                f"{api_url}: a token is not sent unencrypted; use https, or a tunnel to this machine"
            )
        headers = {} if bearer is None else {"authorization": f"Bearer {bearer}"}
        timeout = httpx.Timeout(_READ_S, connect=_CONNECT_S)
        self._client = httpx.Client(base_url=self._api_url, headers=headers, timeout=timeout, transport=transport)

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
        with self._asking(), self._client.stream("GET", path, params=parameters) as answer:
            return _json_of(answer)

    def post(self, path: str, body: Mapping[str, object]) -> Any:
        """The JSON that is answered to ``body``.

        Raises:
            TessellaError: as `get`.
        """
        with self._asking(), self._client.stream("POST", path, json=body) as answer:
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
            TessellaError: as `get`, and what ended the answer in its middle.
        """
        with self._asking(), self._client.stream("POST", path, json=body) as answer:
            if answer.status_code != httpx.codes.OK:
                _json_of(answer)
            for line in answer.iter_lines():
                if not line.startswith("data:"):
                    continue  # blank lines and comments
                data = line.removeprefix("data:").strip()
                if data == "[DONE]":
                    return
                event = _parsed(data)
                if "error" in event:
                    raise _refusal(event)
                yield event
        raise StreamReset("the node's answer ended before it was complete; ask again")

    @contextmanager
    def _asking(self) -> Iterator[None]:
        try:
            yield
        except httpx.ConnectError as error:
            raise TransportError(
                f"no node answers at {self._api_url} ({error}): start one with `tessella-p2p daemon`, "
                "or name another with -a URL before the subcommand"
            ) from error
        except httpx.TimeoutException as error:
            raise TransportError(f"the node at {self._api_url} did not answer in time") from error
        except httpx.TransportError as error:
            raise StreamReset(f"the connection to {self._api_url} broke: {error}") from error


def _is_local(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def _json_of(answer: httpx.Response) -> Any:
    content = bytearray()
    for part in answer.iter_bytes():
        content += part
        if len(content) > MAX_ANSWER_BYTES:
            raise MalformedMessage(f"{answer.url} answers with over {MAX_ANSWER_BYTES // MIB} MiB")
    try:
        body = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise MalformedMessage(
            f"{answer.url} answers with status {answer.status_code} and no JSON: is it a Tessella node?"
        ) from error
    if answer.status_code != httpx.codes.OK:
        raise _refusal(body)
    return body


def _parsed(data: str) -> dict[str, Any]:
    try:
        event = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise MalformedMessage("an event of the node's stream is no JSON") from error
    if not isinstance(event, dict):
        raise MalformedMessage("an event of the node's stream is no JSON object")
    return event


def _refusal(body: object) -> TessellaError:
    error = body.get("error") if isinstance(body, dict) else None
    if not isinstance(error, dict):
        return MalformedMessage("the node refused, and did not say why")
    return error_from_code(str(error.get("code")), str(error.get("message")))
