"""A running node's HTTP surface in textual's asyncio loop: the rules of `cli.node_client`, one request beside the other."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

import httpx

from tessella_p2p.base.errors import MalformedMessage, NoRoute, StreamReset
from tessella_p2p.cli.node_client import (
    DONE,
    TIMEOUT,
    DataReader,
    bearer_headers,
    check_length,
    checked_url,
    event_of,
    may_use_proxies,
    parsed_answer,
    told_errors,
)

_MAX_MODELS = 1000


class AsyncNode:
    """One node's HTTP API; `aclose` it.

    Args:
        api_url: ``http://HOST:PORT``.
        bearer: a token that every request carries; it goes to this machine, or over HTTPS.

    Raises:
        ConfigurationError: ``api_url`` is no URL, or would show the token to the network.
    """

    def __init__(self, api_url: str, bearer: str | None = None) -> None:
        self.api_url = checked_url(api_url, bearer)
        self._client = httpx.AsyncClient(
            base_url=self.api_url,
            headers=bearer_headers(bearer),
            timeout=TIMEOUT,
            trust_env=may_use_proxies(self.api_url),
        )

    async def aclose(self) -> None:
        """Close its connections."""
        await self._client.aclose()

    async def get(self, path: str) -> Any:
        """The JSON that the node answers.

        Raises:
            TransportError: nobody answers there.
            MalformedMessage: the answer is too long, or no JSON.
            TessellaError: what the node refused with.
        """
        with told_errors(self.api_url):
            async with self._client.stream("GET", path) as answer:
                return await _json_of(answer)

    async def status(self) -> dict[str, Any]:
        """``/status``.

        Raises:
            MalformedMessage: whoever answers there is no node.
            TessellaError: see `get`.
        """
        body = await self.get("/status")
        if not isinstance(body, dict) or "peer_id" not in body or "state" not in body:
            raise MalformedMessage(f"{self.api_url} answers, and is no Tessella node")
        return body

    async def model_ids(self) -> tuple[str, ...]:
        """The models that the node can answer with now.

        Raises:
            NoRoute: there is none.
            TessellaError: see `get`.
        """
        body = await self.get("/v1/models")
        try:
            models = tuple(str(model["id"]) for model in body["data"][:_MAX_MODELS])
        except (KeyError, TypeError, IndexError) as error:
            raise MalformedMessage(f"{self.api_url}/v1/models is no list of models") from error
        if not models:
            raise NoRoute("the node has no complete route for any model now")
        return models

    async def pictures(self) -> AsyncGenerator[Mapping[str, Any], None]:
        """Pictures of the mesh, one each second, until the node ends them.

        Raises:
            TessellaError: see `get`.
        """
        async with aclosing(self._stream("GET", "/events", None)) as events:
            async for event in events:
                yield event

    async def events(self, path: str, body: Mapping[str, object]) -> AsyncGenerator[Mapping[str, Any], None]:
        """Post ``body`` and give each event of the streamed answer; closing the iterator ends the request at the node.

        Raises:
            StreamReset: the stream ended before its end was said.
            TessellaError: as `get`, and what ended the answer in its middle.
        """
        async with aclosing(self._stream("POST", path, body)) as events:
            async for event in events:
                yield event

    async def _stream(
        self, method: str, path: str, body: Mapping[str, object] | None
    ) -> AsyncGenerator[Mapping[str, Any], None]:
        with told_errors(self.api_url):
            async with self._client.stream(method, path, json=body) as answer:
                if answer.status_code != httpx.codes.OK:
                    await _json_of(answer)
                reader = DataReader(answer)
                async for part in answer.aiter_bytes():
                    for data in reader.feed(part):
                        if data == DONE:
                            return
                        yield event_of(data.decode(errors="replace"))
        raise StreamReset("the node's answer ended before it was complete; ask again")


async def _json_of(answer: httpx.Response) -> Any:
    content = bytearray()
    async for part in answer.aiter_bytes():
        content += part
        check_length(answer, len(content))
    return parsed_answer(answer, bytes(content))
