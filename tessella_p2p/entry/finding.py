"""Where an entry finds routes now: among the stages that its swarm view knows (shell: it reads two clocks)."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import trio

from tessella_p2p.base.clock import WallClock
from tessella_p2p.base.errors import NoRoute, PromptTooLong
from tessella_p2p.base.ids import PeerId
from tessella_p2p.dht.service import Discovery
from tessella_p2p.dht.stage_records import VerifiedStage
from tessella_p2p.entry.blame import Blame
from tessella_p2p.entry.codec import PromptCodec
from tessella_p2p.entry.readiness import PathStage, path_of
from tessella_p2p.entry.routes import Route, choose_route, is_serving, no_route
from tessella_p2p.model.coverage import walk
from tessella_p2p.model.recipe import by_preference


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model that this entry speaks for."""

    model_id: str
    codec: PromptCodec
    manifest_root: bytes
    recipes: tuple[str, ...]
    """Their own names, in order of preference; each is served in one or more drift classes."""
    hidden_size: int = 0
    """Elements of a row of hidden states, to bound what a request makes the stages send; 0 where nothing of them is known."""


class RouteFinder:
    """Finds the routes of one model.

    Args:
        model: which one.
        discovery: whose view has the stages.
        clock: dates their records.
        blame: who failed lately, and is avoided.
        own: this node, whose stage costs no hop.
    """

    def __init__(self, model: ServedModel, discovery: Discovery, clock: WallClock, blame: Blame, own: PeerId) -> None:
        self._model = model
        self._discovery = discovery
        self._clock = clock
        self._blame = blame
        self._own = own

    def find(self, positions: int = 1, recipe: str | None = None) -> Route:
        """The best route now that holds ``positions``; of ``recipe`` alone when the session began on one.

        Raises:
            NoRoute: names the missing layers.
        """
        total = self._model.codec.total_layers
        penalties = self._blame.penalties(trio.current_time())
        meshes = [self._stages(name, positions) for name in (self._published() if recipe is None else (recipe,))]
        for stages in meshes:
            route = choose_route(stages, total, penalties, self._own)
            if route is not None:
                return route
        fullest = max(meshes, key=lambda stages: _num_rendered(stages, total), default=())
        raise no_route(self._model.model_id, fullest, total)

    def exists(self) -> bool:
        """Whether there is any route."""
        try:
            self.find()
        except NoRoute:
            return False
        return True

    def holding(self, prompt_tokens: int, answer_tokens: int) -> Route:
        """A route that holds both.

        Raises:
            NoRoute: there is none at all.
            PromptTooLong: there are shorter ones; says how long.
        """
        try:
            return self.find(prompt_tokens + answer_tokens)
        except NoRoute:
            longest = self._longest().max_positions
            more = f", and at least {answer_tokens} more are asked for" if answer_tokens else ""
            raise PromptTooLong(f"this route holds {longest} tokens; the prompt has {prompt_tokens}{more}") from None

    def serving(self) -> Collection[PathStage]:
        """Every stage that says that it serves."""
        names = self._published()
        return {each for name in names for each in path_of(filter(is_serving, self._stages(name, 1)))}

    def _longest(self) -> Route:
        """The route that holds the most positions. Raises `NoRoute`."""
        route = self.find()
        lengths = sorted({stage.max_positions for name in self._published() for stage in self._stages(name, 1)})
        low, high = 0, len(lengths)
        while low < high:
            middle = (low + high) // 2
            try:
                route = self.find(lengths[middle])
            except NoRoute:
                high = middle
            else:
                low = middle + 1
        return route

    def _stages(self, recipe: str, positions: int) -> tuple[VerifiedStage, ...]:
        """Stages that may serve a session of ``positions``."""
        total = self._model.codec.total_layers
        stages = self._discovery.view.stages(self._model.manifest_root, recipe, self._clock.unix_ms())
        return tuple(s for s in stages if s.max_positions >= positions and s.total_layers == total)

    def _published(self) -> list[str]:
        """Names under which the model's recipes are served now."""
        seen = self._discovery.view.recipes(self._model.manifest_root, self._clock.unix_ms())
        return by_preference(self._model.recipes, seen)


def _num_rendered(stages: Iterable[VerifiedStage], total_layers: int) -> int:
    return walk((stage.layers for stage in stages), total_layers).num_covered
