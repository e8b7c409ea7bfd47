"""An app that has a node: how it comes to one, by attaching or by joining a mesh, and what it sees of the mesh through it."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Final

from textual import work
from textual.app import App

from tessella_p2p.base.errors import ApiKeyRefused, ConfigurationError, TessellaError, TransportError
from tessella_p2p.base.ids import PeerId
from tessella_p2p.cli.options import DEFAULT_API_URL
from tessella_p2p.cli.tui.goal import Goal, check_operator, operator_of
from tessella_p2p.cli.tui.joined import JoinedNode
from tessella_p2p.cli.tui.node import AsyncNode
from tessella_p2p.cli.tui.picture import Picture, read_picture
from tessella_p2p.cli.tui.remembered import Remembered, remember
from tessella_p2p.cli.tui.screens import ConnectScreen, KeyScreen, SwarmScreen
from tessella_p2p.cli.tui.swarm import Numbers
from tessella_p2p.cli.tui.transcript import Kind
from tessella_p2p.cli.tui.wishes import Wishes
from tessella_p2p.cli.tui.words import explained, shown

_LOOK_AGAIN_S: Final = (1.0, 2.0, 4.0, 8.0)
_SILENT_S: Final = 8.0
"""A node sends a picture each second."""


class LinkedApp(App[None]):
    """The half of the terminal UI that is about its node; `say`, `node_linked` and `mesh_seen` are the other half's.

    Args:
        wishes: what is known before anything is asked.
        remembered_path: where answers are kept.
        environ: the process environment.
    """

    def __init__(self, wishes: Wishes, remembered_path: Path, environ: Mapping[str, str]) -> None:
        super().__init__()
        self.started: list[JoinedNode] = []
        """Every node that this UI started; whoever runs it ends them."""
        self.wishes = wishes
        self.node: AsyncNode | None = None
        self.picture: Picture | None = None
        """The newest one; None before the first."""
        self.lost = ""
        """Why there is no newer one; empty while they come."""
        self.numbers = Numbers()
        self._remembered_path = remembered_path
        self._environ = environ

    @abstractmethod
    async def say(self, text: str, kind: Kind) -> None:
        """Tell the user something."""

    @abstractmethod
    def node_linked(self, node: AsyncNode) -> None:
        """There is another node now."""

    @abstractmethod
    def mesh_seen(self) -> None:
        """`picture` or `lost` is another one."""

    @work(exclusive=True, group="link")
    async def go(self, *, first: bool) -> None:
        """Ask where to go, unless it is known, until a node is linked or the user leaves it as it was."""
        goal, said = None, ""
        if first:
            try:
                goal = self.wishes.goal()
            except ConfigurationError as error:
                said = str(error)
        asked = goal is None
        while True:
            if goal is None:
                goal = await self._ask_goal(said)
                asked = True
                if goal is None:
                    if self.node is None:
                        self.exit()
                    return
            try:
                linked = await self._link(goal, asked)
            except TessellaError as error:
                said = explained(error)
            else:
                if linked:
                    return
                said = ""
            goal = None

    async def _ask_goal(self, said: str) -> Goal | None:
        kept = self.wishes.remembered
        address = self.wishes.api_url or self.wishes.mesh or kept.api_url or kept.mesh or self.wishes.known_mesh or ""
        if not address and await _answers(DEFAULT_API_URL):
            address = DEFAULT_API_URL
            said = said or f"A node runs on this machine: Enter attaches to {DEFAULT_API_URL}."
        return await self.push_screen_wait(ConnectScreen(address, kept.operator or "", said))

    async def _link(self, goal: Goal, asked: bool) -> bool:
        """Attach to the node, or join the mesh; whether that was done.

        Raises:
            TessellaError: it cannot be done; says why.
        """
        if goal.api_url is not None:
            return await self._attach_to(goal.api_url, goal.operator, Remembered(api_url=goal.api_url), asked)
        assert goal.mesh is not None
        kept = Remembered(mesh=goal.mesh.multiaddr)
        note = ""
        try:
            return await self._attach_to(DEFAULT_API_URL, goal.operator, kept, asked)
        except ConfigurationError:
            note = f"The node at {DEFAULT_API_URL} belongs to another mesh, and is left alone."
        except TessellaError:
            pass  # nobody there: a node of our own it is
        for node in self.started:
            await node.leave()
        # a daemon's settings import much, and few need them
        from tessella_p2p.cli.tui.join_screen import JoinScreen

        screen = JoinScreen(goal.mesh, self.wishes.model_id, self._environ, note, self.started)
        joined = await self.push_screen_wait(screen)
        if joined is None:
            return False
        if await self._attach_to(await joined.api_url(), goal.operator, kept, asked):
            self._watch_joined(joined)
            await self.say("this machine serves layers to the mesh for as long as this runs", "note")
            return True
        return False

    async def _attach_to(self, api_url: str, operator: PeerId | None, kept: Remembered, asked: bool) -> bool:
        """Link to a node, asking for a key where it wants one; False where the user has none.

        Raises:
            TessellaError: it does not answer, or follows another operator.
        """
        before = self.wishes.remembered
        is_same = (before.api_url, before.mesh) == (kept.api_url, kept.mesh)
        key = self.wishes.key_for(api_url)
        typed: str | None = None
        while True:
            node = AsyncNode(api_url, key)
            try:
                status = await node.status()
                following = operator_of(status)
                check_operator(operator, following)
            except ApiKeyRefused as error:
                await node.aclose()
                key = typed = await self.push_screen_wait(KeyScreen(api_url, str(error), is_kept=asked or is_same))
                if key is None:
                    return False
            except BaseException:  # a worker that is cancelled leaves no connection open either
                await node.aclose()
                raise
            else:
                break
        is_new = operator is None and following is not None
        if asked:
            same_key = before.api_key if is_same else None
            self.keep(replace(kept, operator=following, api_key=typed or same_key, model_id=before.model_id))
        elif typed is not None and is_same:
            self.keep(replace(before, api_key=typed))
        note = f"; its operator is {shown(following)}, remembered from now on" if is_new and asked else ""
        await self._linked(node, note)
        return True

    async def _linked(self, node: AsyncNode, note: str) -> None:
        former, self.node = self.node, node
        if former is not None:
            await former.aclose()
        self.picture, self.lost = None, ""
        await self.say(f"linked to {node.api_url}{note} · /help lists the commands", "note")
        self._watch_mesh(node)
        self.node_linked(node)

    def keep(self, remembered: Remembered) -> None:
        """Remember what was answered."""
        self.wishes = replace(self.wishes, remembered=remembered)
        try:
            remember(self._remembered_path, remembered)
        except ConfigurationError as error:
            self.notify(shown(error, 300), severity="warning", markup=False)

    @work(exclusive=True, group="mesh")
    async def _watch_mesh(self, node: AsyncNode) -> None:
        """Keep the picture of the mesh, as long as there is a node."""
        failures = 0
        while True:
            try:
                async with aclosing(node.pictures()) as pictures, asyncio.timeout(_SILENT_S) as patience:
                    async for event in pictures:
                        failures = 0
                        self._see(read_picture(event))
                        patience.reschedule(asyncio.get_running_loop().time() + _SILENT_S)
            except TimeoutError:
                self._lose(TransportError(f"{node.api_url} is silent"))
            except TessellaError as error:
                self._lose(error)
            await asyncio.sleep(_LOOK_AGAIN_S[min(failures, len(_LOOK_AGAIN_S) - 1)])
            failures += 1

    def _see(self, picture: Picture) -> None:
        self.picture, self.lost = picture, ""
        if isinstance(self.screen, SwarmScreen):
            self.screen.show(picture)
        self.mesh_seen()

    def _lose(self, error: TessellaError) -> None:
        self.lost = "the node does not answer" if isinstance(error, TransportError) else shown(error, 120)
        if isinstance(self.screen, SwarmScreen):
            self.screen.lose(self.lost)
        self.mesh_seen()

    @work(exclusive=True, group="joined")
    async def _watch_joined(self, node: JoinedNode) -> None:
        """Say so when the node that was started ends by itself."""
        await node.ended()
        try:
            node.check()
        except ConfigurationError as error:
            await self.say(f"{error}\n/connect starts it again", "error")


async def _answers(api_url: str) -> bool:
    """Whether a node runs there, with or without a key."""
    node = AsyncNode(api_url)
    try:
        await node.status()
    except ApiKeyRefused:
        return True
    except TessellaError:
        return False
    finally:
        await node.aclose()
    return True
