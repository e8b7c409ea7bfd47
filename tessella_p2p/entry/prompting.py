"""From what a request gives to the ids of its prompt. No peer is asked, and no weight is read for it."""

from __future__ import annotations

from collections.abc import Sequence

from tessella_p2p.base.errors import InvalidRequest, PromptTooLong, UnknownModel
from tessella_p2p.entry.api import GenerateRequest
from tessella_p2p.entry.codec import PromptCodec


def check_model(asked: str, served: str) -> None:
    """Raise `UnknownModel` unless the model that is asked for is the one that this entry speaks for."""
    if asked != served:
        raise UnknownModel(f"the model {asked!r} is not served here; this node serves {served!r}")


async def prompt_ids(codec: PromptCodec, request: GenerateRequest, max_ids: int | None) -> tuple[int, ...]:
    """The prompt of a generation, in tokens.

    Args:
        codec: of the model.
        request: gives exactly one of messages, prompt, prompt_ids and gap.
        max_ids: the longest prompt that this node accepts; None for any.

    Raises:
        InvalidRequest: it gives none or several, or one that the model has no form for; names the field.
        PromptTooLong: it is over ``max_ids``.
    """
    given = [part for part in (request.messages, request.prompt, request.prompt_ids, request.gap) if part is not None]
    if len(given) != 1:
        raise InvalidRequest("exactly one of messages, prompt, prompt_ids and gap is needed", "prompt")
    if request.tools and request.messages is None:
        raise InvalidRequest("tools need messages", "tools")
    if request.messages is not None:
        ids = await codec.encode_chat(request.messages, request.tools)
    elif request.gap is not None:
        ids = await codec.encode_gap(request.gap.prefix, request.gap.suffix)
    elif request.prompt is not None:
        ids = await codec.encode_prompt(request.prompt)
    else:
        ids = checked_ids(request.prompt_ids or (), codec.vocabulary, "prompt_ids")
    return fitting(ids, max_ids, "prompt")


def checked_ids(ids: Sequence[int], vocabulary: int, param: str) -> list[int]:
    """The ids that a client gave, as they are. Raises `InvalidRequest` for one outside of the vocabulary."""
    if ids and (min(ids) < 0 or max(ids) >= vocabulary):  # in C: a client may give a million
        raise InvalidRequest(f"token ids are from 0 to {vocabulary - 1}", param)
    return list(ids)


def fitting(ids: Sequence[int], max_ids: int | None, param: str) -> tuple[int, ...]:
    """The ids, if there are some and no more than this node accepts. Raises `InvalidRequest`, `PromptTooLong`."""
    if not ids:
        raise InvalidRequest(f"the {param} is empty", param)
    if max_ids is not None and len(ids) > max_ids:
        raise PromptTooLong(f"this node accepts prompts of {max_ids} tokens; this one has {len(ids)}")
    return tuple(ids)
