"""Vectors (shell): what an embedding request gives, in tokens, and several of its inputs on their way through the stages at once.

Each input is a session of its own, with its own ticket, route and reroutes: see `session.Session.vector`. The first one that fails ends
the others, and the request.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import trio

from tessella_p2p.base.errors import InvalidRequest, TessellaError
from tessella_p2p.base.limits import MAX_EMBEDDING_INPUTS, MAX_EMBEDDINGS_AT_ONCE
from tessella_p2p.entry.api import Embedded
from tessella_p2p.entry.codec import PromptCodec
from tessella_p2p.entry.prompting import checked_ids, fitting


async def input_ids(
    codec: PromptCodec, inputs: Sequence[str | Sequence[int]], max_ids: int | None
) -> list[tuple[int, ...]]:
    """The tokens of each input.

    Args:
        codec: of the model.
        inputs: texts as they stand, or token ids.
        max_ids: the longest input that this node accepts; None for any.

    Raises:
        InvalidRequest: none or too many, an empty one, an id outside of the vocabulary.
        PromptTooLong: one is over ``max_ids``.
    """
    if not 0 < len(inputs) <= MAX_EMBEDDING_INPUTS:
        raise InvalidRequest(f"{len(inputs)} inputs; 1 to {MAX_EMBEDDING_INPUTS} are accepted", "input")
    found: list[tuple[int, ...]] = []
    for each in inputs:
        if isinstance(each, str):
            ids = await codec.encode_prompt(each)
        else:
            ids = checked_ids(each, codec.vocabulary, "input")
        found.append(fitting(ids, max_ids, "input"))
    return found


async def embed_each(
    inputs: Sequence[tuple[int, ...]], embed: Callable[[tuple[int, ...]], Awaitable[Embedded]]
) -> tuple[Embedded, ...]:
    """What ``embed`` makes of each input, in their order; `MAX_EMBEDDINGS_AT_ONCE` at a time. Cancelled, all of them are.

    Raises:
        TessellaError: the first that one of them raised; the others are cancelled then.
    """
    found: dict[int, Embedded] = {}
    failures: list[TessellaError] = []
    waiting = iter(enumerate(inputs))

    async def work() -> None:
        for index, ids in waiting:  # shared: whoever is free takes the next one
            try:
                found[index] = await embed(ids)
            except TessellaError as error:
                failures.append(error)
                nursery.cancel_scope.cancel()
                return

    async with trio.open_nursery() as nursery:
        for _ in range(min(len(inputs), MAX_EMBEDDINGS_AT_ONCE)):
            nursery.start_soon(work)
    if failures:
        raise failures[0]
    return tuple(found[index] for index in range(len(inputs)))
