"""Manifests that the operator publishes: checked, durable, served from then on (shell; its checks are pure).

A published manifest takes the place of what its model's name meant before; it stays over restarts, also against the artifact that the
configuration names. Workers of the manifest before stay until they leave, and none of it registers anew. Once `MAX_SERVED_MODELS`
manifests are known, the oldest one that is neither current nor held by a worker makes room.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import structlog
import trio

from tessella_p2p.base.errors import ConfigurationError, InvalidRequest, MalformedMessage, StorageError
from tessella_p2p.base.ids import PeerId
from tessella_p2p.orchestrator.catalogue import Catalogue
from tessella_p2p.orchestrator.context import Handlers, OrchestratorContext
from tessella_p2p.orchestrator.reading import manifest_of
from tessella_p2p.orchestrator.terms import ModelTerms, ServedModel
from tessella_p2p.wire import messages as m
from tessella_p2p.wire.envelope import Message, decode_message, encode_message

_LOG: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)


class PublishedManifest(Message):
    """A row on disk: what was published, and when (Unix milliseconds), later than what was published before it."""

    at: m.TimeMs
    manifest: m.PublishManifest


def served_model(manifest: m.PublishManifest) -> ServedModel:
    """The model that a manifest makes.

    Raises:
        InvalidRequest: terms of which none can be assigned by; ``param`` is ``terms``.
    """
    terms: dict[tuple[str, str], ModelTerms] = {}
    for entry in manifest.terms:
        place = (entry.recipe, entry.device)
        if "@" in entry.recipe:
            raise InvalidRequest(f"terms are for a recipe, whatever the drift class: {entry.recipe}", param="terms")
        if place in terms:
            raise InvalidRequest(f"two terms for recipe {entry.recipe} on {entry.device}", param="terms")
        figures = entry.model_dump(exclude={"recipe", "device"})
        try:
            terms[place] = ModelTerms(total_layers=manifest.total_layers, **figures)
        except ConfigurationError as error:
            raise InvalidRequest(f"recipe {entry.recipe} on {entry.device}: {error}", param="terms") from error
    return ServedModel(
        model_id=manifest.model_id,
        manifest_root=manifest.manifest_root,
        contract_hash=manifest.contract_hash,
        total_layers=manifest.total_layers,
        terms=terms,
    )


def check_against(catalogue: Catalogue, model: ServedModel) -> None:
    """Refuse what contradicts a manifest that is known: a root stands for one name, one contract and one number of layers.

    Raises:
        InvalidRequest: it does; ``param`` says in what.
    """
    known = catalogue.find(model.manifest_root)
    if known is None:
        return
    for name in ("model_id", "contract_hash", "total_layers"):
        if getattr(known, name) != getattr(model, name):
            raise InvalidRequest(f"this manifest is known with another {name}", param=name)


class Publishing:
    """Publishes manifests.

    Args:
        in_use: the manifest roots that workers hold.
    """

    def __init__(
        self, context: OrchestratorContext, catalogue: Catalogue, in_use: Callable[[], Collection[bytes]]
    ) -> None:
        self._context = context
        self._catalogue = catalogue
        self._in_use = in_use
        self._lock = trio.Lock()
        self._newest_at = 0

    def handlers(self) -> Handlers:
        """What this part answers, for the operator alone."""
        return {m.PublishManifest: self._publish}

    async def restore(self) -> None:
        """Serve what was published before; call it once, first.

        Raises:
            StorageError: it cannot be read, or a row is damaged.
        """
        rows = await self._context.run_blocking(self._context.store.models)
        try:
            published = sorted(
                (decode_message(PublishedManifest, row) for row in rows.values()), key=lambda one: one.at
            )
            models = [served_model(one.manifest) for one in published]
        except (MalformedMessage, InvalidRequest) as error:
            raise StorageError(f"the ledger holds a damaged manifest ({error}): put a backup back") from error
        self._newest_at = published[-1].at if published else 0
        for model in models:
            self._catalogue.publish(model, self._catalogue.room_for(model, ()))
            _LOG.info("manifest_served", model_id=model.model_id, manifest_root=model.manifest_root.hex())

    async def _publish(self, _: PeerId, request: m.PublishManifest) -> m.OrchestratorAnswer:
        context, model = self._context, served_model(request)
        async with self._lock:
            check_against(self._catalogue, model)
            retired = self._catalogue.room_for(model, self._in_use())
            # They are served in this order after a restart, so a clock that was set back does not decide it.
            self._newest_at = max(context.clock.unix_ms(), self._newest_at + 1)
            row = encode_message(PublishedManifest(at=self._newest_at, manifest=request))
            with trio.CancelScope(shield=True):  # what is durable is served
                if retired is not None:
                    await context.run_blocking(lambda: context.store.keep_model(retired, None))
                await context.run_blocking(lambda: context.store.keep_model(model.manifest_root, row))
                self._catalogue.publish(model, retired)
        _LOG.info("manifest_published", model_id=model.model_id, manifest_root=model.manifest_root.hex())
        return manifest_of(model)
