"""``POST /infill``: what editors ask of a llama.cpp server, streamed or not.

It differs from the other routes for text in its words (`infill_answer`) and in three things that editors lean on. A request for no
token at all is a warm-up: one token is generated and dropped, which leaves what was asked in the prefix caches of the stages. An
answer may be cut by time and by indentation. And where the extra texts make a prompt too long, the older half of them is left out
until it is not.
"""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import replace
from typing import Any, Literal

import trio
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tessella_p2p.base.errors import LocalProtocolError, PromptTooLong, TessellaError
from tessella_p2p.base.limits import SSE_PING_S
from tessella_p2p.bridge.answer_headers import answer_headers
from tessella_p2p.bridge.answering import ClientWatch, EventStream, understood
from tessella_p2p.bridge.answers import encoded, event
from tessella_p2p.bridge.callers import caller_of
from tessella_p2p.bridge.choices import generated, name_param
from tessella_p2p.bridge.generate import lone_model
from tessella_p2p.bridge.infill_answer import Cut, Filled, InfillChunk, selected
from tessella_p2p.bridge.metrics import BridgeMetrics, Outcome
from tessella_p2p.bridge.openai_models.infill import ExtraChunk, InfillBody, infill_body
from tessella_p2p.entry.api import Delta, Entry, GenerateRequest, Generation
from tessella_p2p.entry.text import first_stop

_CUT = "cut"
"""How a generation that a `Cut` ended is counted."""
_PARAMS = {"suffix": "input_suffix", "max_tokens": "n_predict"}
"""What editors call the fields that the entry may find fault with."""


class InfillEndpoint:
    """An ASGI app for the one path."""

    def __init__(self, entry: Entry, metrics: BridgeMetrics, ping_s: float = SSE_PING_S) -> None:
        self._entry = entry
        self._metrics = metrics
        self._ping_s = ping_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request. Cancellation closes the session, and then the connection.

        Raises:
            TessellaError: when nothing was sent yet; the app's handler turns it into an answer.
        """
        request = Request(scope, receive)
        asked = await understood(request, infill_body)
        model = asked.model if asked.model is not None else lone_model(self._entry.known_models())
        caller = caller_of(request.scope)
        sampling = replace(asked.asked_of(model), caller=caller)
        stream = EventStream(send, self._ping_s) if asked.stream else None
        watch = ClientWatch(receive)
        filling = _Filling(self._entry, self._metrics, asked, sampling, stream, watch)
        try:
            if stream is not None:
                await stream.guarded(filling.fill, watch, _PARAMS)
                return
            await watch.guard(filling.fill)
        except TessellaError as error:
            name_param(error, _PARAMS)
            raise
        if not watch.left:
            await Response(filling.body, media_type="application/json", headers=filling.headers)(scope, receive, send)


class _Filling:
    """One gap while it is filled."""

    def __init__(
        self,
        entry: Entry,
        metrics: BridgeMetrics,
        asked: InfillBody,
        sampling: GenerateRequest,
        stream: EventStream | None,
        watch: ClientWatch,
    ) -> None:
        self._entry = entry
        self._metrics = metrics
        self._asked = asked
        self._sampling = sampling
        self._stream = stream
        self._watch = watch
        self._warm_up = asked.token_limit() == 0
        self.body = b""
        self.headers: dict[str, str] = {}

    async def fill(self) -> None:
        """Generate, and send the events of a stream or leave the whole answer in ``body``."""
        extra = self._asked.input_extra
        with self._metrics.generating() as outcome:
            while not await self._fits(extra, outcome):
                extra = extra[(len(extra) + 1) // 2 :]  # the newest ones come last, and are worth the most

    async def _fits(self, extra: tuple[ExtraChunk, ...], outcome: Outcome) -> bool:
        """Fill the gap behind the ``extra`` texts; False where the prompt is too long, and would be shorter without some of them."""
        admitted = False

        async def pump(generation: Generation) -> None:
            nonlocal admitted
            admitted = True
            try:
                await self._pump(generation, len(extra) < len(self._asked.input_extra), outcome)
            finally:
                self._watch.stand_down()

        try:
            await generated(self._entry, self._request(extra), pump)
        except PromptTooLong:
            if admitted or not extra:
                raise
            return False
        return True

    def _request(self, extra: tuple[ExtraChunk, ...]) -> GenerateRequest:
        limit = 1 if self._warm_up else self._asked.token_limit()
        return replace(self._sampling, gap=self._asked.gap(extra), max_tokens=limit)

    async def _pump(self, generation: Generation, truncated: bool, outcome: Outcome) -> None:
        began = first = trio.current_time()
        cut = Cut(self._asked.n_indent or 0, self._asked.time_limit_s())
        num_prompt = len(generation.prepared.prompt_ids)
        token_ids: list[int] = []
        texts: list[str] = []
        if self._stream is not None:
            self._stream.generation = generation
        async with aclosing(generation.events()) as events:
            async for each in events:
                if not isinstance(each, Delta):
                    outcome.finished = each
                    token_ids = list(each.token_ids)
                    break
                if not token_ids:
                    first = trio.current_time()
                token_ids += each.token_ids
                texts.append(cut.feed(each.text, trio.current_time()))
                await self._send(texts[-1], each.token_ids, len(token_ids), num_prompt)
                if cut.cut:
                    outcome.code = _CUT
                    break
        if outcome.finished is None and not cut.cut:
            raise LocalProtocolError(f"the events of {generation.prepared.request_id} ended without Finished")
        reason: Literal["stop", "length", "cut"] = "cut" if outcome.finished is None else outcome.finished.reason
        if self._warm_up:
            texts, token_ids, reason = [], [], "length"
        filled = Filled(
            model=generation.prepared.model,
            text="".join(texts),
            num_prompt=num_prompt,
            token_ids=tuple(token_ids),
            truncated=truncated,
            reason=reason,
            stopping_word=self._stopping_word(token_ids) if reason == "stop" else "",
            first_ms=(first - began) * 1000,
            rest_ms=(trio.current_time() - first) * 1000,
        )
        self.headers = answer_headers(generation.prepared.request_id, generation.route())
        await self._finish(filled)

    def _stopping_word(self, token_ids: list[int]) -> str:
        return (first_stop(self._entry.text_of(token_ids), self._asked.stop) or "") if self._asked.stop else ""

    async def _send(self, text: str, token_ids: tuple[int, ...], so_far: int, num_prompt: int) -> None:
        if self._stream is None or self._warm_up or not text:
            return
        chunk: InfillChunk = {
            "index": 0,
            "content": text,
            "tokens": token_ids,
            "stop": False,
            "tokens_predicted": so_far,
            "tokens_evaluated": num_prompt,
        }
        await self._stream.write(event(chunk))

    async def _finish(self, filled: Filled) -> None:
        answer = filled.answer()
        if self._stream is not None:
            answer["content"] = ""  # it was sent
            self._stream.stop_pings()
        chosen: dict[str, Any] = selected(answer, self._asked.response_fields)
        if self._stream is None:
            self.body = encoded(chosen)
        else:
            await self._stream.write(event(chosen))
