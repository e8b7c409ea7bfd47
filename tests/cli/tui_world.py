"""The terminal UI in its tests: a node of doubles in a thread, and what a person sees and presses."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from textual import events
from textual.pilot import Pilot

from tessella_p2p.base.ids import LayerRange, PeerId
from tessella_p2p.bridge.app import create_app
from tessella_p2p.bridge.node_view import NodeStatus, OrchestratorView, PeerStatus, PeerView
from tessella_p2p.cli.tui.app import TessellaUi
from tessella_p2p.cli.tui.remembered import default_path, read_remembered
from tessella_p2p.cli.tui.wishes import Wishes
from tessella_p2p.entry.readiness import ModelReadiness
from tessella_p2p.wire.keys import NodeKey
from tests.bridge.bridge_doubles import MODEL, SpeakingEntry, StaticNode, serving
from tests.bridge.served_in_thread import ServerThread

PATIENCE_S = 20.0
OPERATOR = NodeKey(bytes(range(32))).peer_id
OTHER_OPERATOR = NodeKey(bytes(range(1, 33))).peer_id
SELF = PeerId("12D3KooWSelf")


def peer(name: str, start: int, end: int, status: PeerStatus = "Healthy", recipe: str = "f32") -> PeerView:
    """A peer that holds ``[start, end)``."""
    return PeerView(PeerId(name), MODEL, (LayerRange(start, end),), status, 0, recipe, ("/ip4/192.0.2.7/tcp/9080",))


WHOLE = (peer(SELF, 0, 12), peer("12D3KooWTail", 12, 30))


@dataclass
class SeeingNode(StaticNode):
    """A node that sees the given stages, and follows the given operator."""

    stages: Sequence[PeerView] = WHOLE
    operator: PeerId = OPERATOR
    readiness: ModelReadiness = field(default_factory=lambda: ModelReadiness("ready", 2.0))

    def status(self) -> NodeStatus:
        orchestrator = OrchestratorView(self.operator, reachable=True, tickets_held=2)
        return replace(super().status(), orchestrator=orchestrator, total_layers=30, readiness=self.readiness)

    def peers(self, model_id: str | None) -> Sequence[PeerView]:
        return self.stages


class NodeThread(ServerThread):
    """A node of doubles behind the real server: the UI has the test's own thread for its loop."""

    def __init__(self, entry: SpeakingEntry, node: StaticNode | None = None, port: int = 0, **settings: Any) -> None:
        super().__init__(lambda: serving(create_app(entry, node or SeeingNode(), **settings), port=port))
        self.entry = entry


@dataclass
class Person:
    """Looks at the UI, and presses keys."""

    ui: TessellaUi
    pilot: Pilot[None]

    def screen(self) -> str:
        """What is on the screen now."""
        strips = self.ui.screen._compositor.render_strips()
        return "\n".join(strip.text.rstrip() for strip in strips)

    async def until(self, holds: Callable[[], bool], what: str) -> None:
        """Wait until something holds."""
        give_up = time.monotonic() + PATIENCE_S
        while not holds():
            assert time.monotonic() < give_up, f"never came: {what}; the screen is:\n{self.screen()}"
            await self.pilot.pause(0.03)

    async def see(self, *texts: str) -> str:
        """Wait until all of ``texts`` are shown; the screen then."""

        def are_shown() -> bool:
            screen = self.screen()
            return all(text in screen for text in texts)

        await self.until(are_shown, repr(texts))
        return self.screen()

    async def press(self, *keys: str) -> None:
        """Press keys by name."""
        await self.pilot.press(*keys)

    async def type(self, text: str) -> None:
        """Type as fast as a terminal can, and press Enter; a newline in ``text`` is Enter too."""
        for character in f"{text}\n":
            self.ui.post_message(events.Key("enter", None) if character == "\n" else events.Key(character, character))
        await self.pilot.pause(0)


@asynccontextmanager
async def a_person(wishes: Wishes, size: tuple[int, int] = (80, 24)) -> AsyncIterator[Person]:
    """Somebody who has just started the UI; `TESSELLA_CONFIG_DIR` says where it remembers."""
    path = default_path(os.environ)
    ui = TessellaUi(replace(wishes, remembered=read_remembered(path)), path, os.environ)
    try:
        async with ui.run_test(size=size) as pilot:
            yield Person(ui, pilot)
    finally:
        for node in ui.started:
            await node.leave()


@asynccontextmanager
async def attached(node: NodeThread, size: tuple[int, int] = (80, 24), **wishes: Any) -> AsyncIterator[Person]:
    """Somebody whose UI is linked to a node."""
    async with a_person(Wishes(api_url=node.url, **wishes), size) as person:
        await person.see("linked to", "answers")
        yield person


def looks(look: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a visit in a loop of its own."""
    asyncio.run(look())


def ui_file() -> Path:
    """Where the UI remembers."""
    return default_path(os.environ)
