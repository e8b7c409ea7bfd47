"""What an entry needs to know of a model: how text becomes tokens and tokens become text. No weight is read for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Protocol

from tessella_p2p.base.clock import WallClock
from tessella_p2p.base.limits import GRAMMAR_WAIT_S
from tessella_p2p.entry.api import ModelFeatures
from tessella_p2p.entry.text import TextDecoder
from tessella_p2p.ledger.blocking import OneAtATime, in_thread
from tessella_p2p.model.artifact import Artifact
from tessella_p2p.model.grammar import Constraint
from tessella_p2p.model.tokenizer import IncrementalDecoder
from tessella_p2p.wire.messages import Grammar


class PromptCodec(Protocol):
    """The text side of a model."""

    @property
    def total_layers(self) -> int:
        """Layers of the whole model."""
        ...

    @property
    def vocabulary(self) -> int:
        """How many token ids there are."""
        ...

    @property
    def end_ids(self) -> frozenset[int]:
        """Tokens that end an answer."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for; none for a control token."""
        ...

    @property
    def features(self) -> ModelFeatures:
        """What the model can be asked for."""
        ...

    async def encode_chat(
        self, messages: Sequence[Mapping[str, object]], tools: Sequence[Mapping[str, object]] = ()
    ) -> list[int]:
        """The ids of a conversation, up to where the assistant begins. Raises `InvalidRequest`, `PromptTooLong`."""
        ...

    async def encode_gap(self, prefix: str, suffix: str) -> list[int]:
        """The ids that ask for what is missing between two texts. Raises `InvalidRequest`, `PromptTooLong`."""
        ...

    async def encode_prompt(self, prompt: str) -> list[int]:
        """The ids of a raw prompt, control tokens included. Raises `InvalidRequest`, `PromptTooLong`."""
        ...

    async def check_grammar(self, grammar: Grammar) -> Constraint:
        """What an answer has to follow from its beginning on. Raises `InvalidRequest`, which says why it cannot, and `Overloaded`."""
        ...

    def decoder(self) -> TextDecoder:
        """A fresh decoder for one answer."""
        ...


class ArtifactCodec:
    """The codec of a real artifact: its own tokenizer and chat template.

    Text is encoded on a thread: a client's megabytes take seconds, and hops go on meanwhile.
    """

    def __init__(self, artifact: Artifact, clock: WallClock) -> None:
        self._artifact = artifact
        self._clock = clock
        self._max_ids = artifact.config.context_length
        self._grammar_turn = OneAtATime(GRAMMAR_WAIT_S, "other grammars")
        self.total_layers = artifact.config.layers
        self.vocabulary = artifact.config.vocabulary
        self.end_ids = artifact.tokenizer.end_ids

    def token_bytes(self, token_id: int) -> bytes:
        """See `PromptCodec.token_bytes`."""
        return self._artifact.tokenizer.token_bytes(token_id)

    @cached_property
    def features(self) -> ModelFeatures:
        """See `PromptCodec.features`."""
        return ModelFeatures(
            fill_in_the_middle=self._artifact.tokenizer.gap is not None,
            tools=self._artifact.shows_tools,
            context_length=self._max_ids,
            embedding_length=self._artifact.config.hidden,
        )

    async def encode_chat(
        self, messages: Sequence[Mapping[str, object]], tools: Sequence[Mapping[str, object]] = ()
    ) -> list[int]:
        """See `PromptCodec.encode_chat`."""
        now_ms, limit = self._clock.unix_ms(), self._max_ids
        encode = self._artifact.encode_messages
        return await in_thread(lambda: encode(messages, now_ms=now_ms, tools=tools, max_ids=limit))

    async def encode_gap(self, prefix: str, suffix: str) -> list[int]:
        """See `PromptCodec.encode_gap`."""
        return await in_thread(lambda: self._artifact.tokenizer.encode_gap(prefix, suffix, max_ids=self._max_ids))

    async def encode_prompt(self, prompt: str) -> list[int]:
        """See `PromptCodec.encode_prompt`."""
        return await in_thread(lambda: self._artifact.tokenizer.encode_prompt(prompt, max_ids=self._max_ids))

    async def check_grammar(self, grammar: Grammar) -> Constraint:
        """See `PromptCodec.check_grammar`."""
        return await self._grammar_turn(lambda: self._artifact.grammars.compile(grammar))

    def decoder(self) -> TextDecoder:
        """See `PromptCodec.decoder`."""
        return IncrementalDecoder(self._artifact.tokenizer)
