"""A question that is under way: its stream, and how it gets on."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing

from tessella_p2p.base.errors import NoRoute
from tessella_p2p.cli.asking import Answer, Question, take
from tessella_p2p.cli.tui.node import AsyncNode
from tessella_p2p.cli.tui.transcript import AnswerView
from tessella_p2p.cli.tui.words import number

_SILENT_S = 3.0
_MAX_ANSWER_CHARS = 1 << 17
"""128 for each token that is asked for: an honest answer never comes near it, and the screen still answers to keys with it."""


class Asking:
    """One question; it can be stopped from the moment that it is there."""

    def __init__(self) -> None:
        self.view = AnswerView()
        self.answer = Answer()
        self.stream: asyncio.Task[None] | None = None
        """None until it is begun."""
        self._began = time.monotonic()
        self._first: float | None = None
        self._last = 0.0
        self._num_chunks = 0

    def stop(self) -> None:
        """End the answer; closing its stream ends it at the node, and on every stage."""
        if self.stream is not None:
            self.stream.cancel()

    async def read(self, node: AsyncNode, question: Question) -> None:
        """Take the answer as it comes.

        Raises:
            TessellaError: see `AsyncNode.events`.
        """
        async with aclosing(node.events(question.path, question.body)) as events:
            async for event in events:
                piece = take(event, self.answer)
                if piece:
                    self._last = time.monotonic()
                    self._first = self._first or self._last
                    self._num_chunks += 1
                    self.view.add(piece)
                if len(self.answer.text) > _MAX_ANSWER_CHARS:
                    raise NoRoute("the answer is longer than any; it was stopped")

    def progress(self, lost: str) -> str:
        """How it gets on, in a line; ``lost`` is why nothing is known of the mesh, and empty otherwise."""
        now = time.monotonic()
        if self._first is None:
            return f"waiting for the first token… {number(now - self._began)} s"
        elapsed = now - self._first
        rate = f" · {number((self._num_chunks - 1) / elapsed)} tok/s" if elapsed > 0.5 else ""
        if now - self._last > _SILENT_S:
            rate = f" · nothing for {number(now - self._last, 0)} s: {lost or 'the mesh looks for another way'}"
        return f"answering · first {number(1000 * (self._first - self._began), 0)} ms{rate}"
