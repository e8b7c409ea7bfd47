"""Joins a mesh: asks what a node needs to know, starts it, and shows how it gets on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, ClassVar, TypeVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.widgets import Input, Static

from tessella_p2p.base.errors import TessellaError, TransportError
from tessella_p2p.cli.terminal import printable
from tessella_p2p.cli.tui.joined import JoinedNode, daemon_arguments, said_by
from tessella_p2p.cli.tui.joining import JoinPlan, join_plan, megabytes, proposed
from tessella_p2p.cli.tui.node import AsyncNode
from tessella_p2p.cli.tui.screens import BOX, AskingScreen
from tessella_p2p.cli.tui.words import number, shown
from tessella_p2p.node.peer_address import PeerAddress

_LOOK_S = 0.5
_LOG_LINES = 4
_MAX_SHOWN_MODELS = 5
_ON_THE_WAY = ("starting", "registering", "loading")
_PHASES = (*_ON_THE_WAY, "ready")
_T = TypeVar("_T")


class JoinScreen(AskingScreen[JoinedNode]):
    """Gives a node that is up, and leaves it running; None where the user did not want to join after all.

    Args:
        mesh: the orchestrator.
        model_id: what is wanted; None for the node's own default.
        environ: the process environment.
        note: what the user should know besides.
        started: takes up every node that is started, for whoever ends what is left in the end.
    """

    DEFAULT_CSS = f"JoinScreen {{ {BOX} }}"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("down", "app.focus_next", show=False),
        Binding("up", "app.focus_previous", show=False),
    ]

    def __init__(
        self, mesh: PeerAddress, model_id: str | None, environ: Mapping[str, str], note: str, started: list[JoinedNode]
    ) -> None:
        super().__init__()
        self._mesh = mesh
        self._wanted = model_id
        self._environ = environ
        self._note = note
        self._started = started
        self._recipes: dict[str, str] = {}
        self._node: JoinedNode | None = None
        self._is_ending = False
        self._model = Input(id="model")
        self._claim = Input(id="claim")
        self._served = Static(Content("asking the orchestrator what it serves…"))
        self._said = Static(Content(""), classes="said")
        self._progress = Static(Content(""))
        self._keys = Static("Enter joins, Up and Down change the field, Escape goes back", classes="keys")

    def compose(self) -> ComposeResult:
        """Two fields, and what there is to know."""
        with Vertical():
            yield Static(Content.styled("Join with this machine?", "bold"))
            yield Static(Content(f"{shown(self._note, 300)}\n" if self._note else ""))
            yield Static(
                Content(
                    f"It starts a node that serves layers to the mesh of {shown(self._mesh.peer_id)} and leaves when you do.\n"
                )
            )
            yield self._served
            yield Static("Model")
            yield self._model
            yield Static("Memory to claim, in MB")
            yield self._claim
            yield self._said
            yield self._progress
            yield self._keys

    def on_mount(self) -> None:
        """Fill the fields in, and ask the orchestrator."""
        try:
            model, claim_mb = proposed(self._mesh, self._wanted, self._environ)
        except TessellaError as error:
            self._said.update(Content(shown(error, 500)))
            return
        self._model.value, self._claim.value = model, str(claim_mb)
        self._model.focus()
        self.run_worker(self._read_served(model), exit_on_error=True)

    async def _read_served(self, proposal: str) -> None:
        try:
            models = await said_by("-m", "tessella_p2p.cli.tui.network_models", self._mesh.multiaddr)
            served = [(str(each["model_id"]), int(each["num_workers"]), each["recipe"]) for each in models]
        except (TessellaError, KeyError, TypeError, ValueError) as error:
            self._served.update(Content(f"The orchestrator did not say what it serves: {shown(error, 120)}"))
            return
        self._recipes = {model: str(recipe) for model, _, recipe in served if recipe}
        words = [
            f"{shown(model)} ({count} worker{'s' * (count != 1)})" for model, count, _ in served[:_MAX_SHOWN_MODELS]
        ]
        self._served.update(Content(f"The mesh serves {', '.join(words) or 'nothing yet'}."))
        is_untouched = self._model.value == proposal and self._wanted is None and self._node is None
        if served and is_untouched and proposal not in {model for model, _, _ in served}:
            self._model.value = printable(served[0][0])

    def on_input_submitted(self) -> None:
        """Start the node."""
        if self._node is not None or self._model.disabled:
            return
        try:
            model = self._model.value.strip()
            plan = join_plan(self._mesh, model, self._claim.value, self._recipes.get(model), self._environ)
        except TessellaError as error:
            self._said.update(Content(shown(error, 500)))
            return
        self._said.update(Content(""))
        self._model.disabled = self._claim.disabled = True
        self._keys.update("Escape ends it and goes back")
        self.run_worker(self._join(plan), group="join", exclusive=True)

    async def _join(self, plan: JoinPlan) -> None:
        node = JoinedNode(daemon_arguments(plan.settings))
        self._node = node
        self._started.append(node)
        try:
            if plan.pull_bytes:
                await self._pull(plan)
            await node.start()
            await self._watch(node)
        except TessellaError as error:
            await node.leave()
            self._said.update(Content(_shown_lines(str(error))))
            self._again()
        else:
            self.dismiss(node)

    async def _pull(self, plan: JoinPlan) -> None:
        """Bring the model here.

        Raises:
            TessellaError: it does not come.
        """
        what = f"pulling {shown(plan.model_id)} ({megabytes(plan.pull_bytes)})…"
        command = ("-m", "tessella_p2p", "models", "pull", plan.model_id, "--models-dir", plan.models_dir, "--json")
        await _waited_for(
            said_by(*command), lambda elapsed_s: self._progress.update(Content(f"{what}   {number(elapsed_s, 0)} s"))
        )

    def _again(self) -> None:
        self._node = None
        self._progress.update(Content(""))
        self._model.disabled = self._claim.disabled = False
        self._model.focus()
        self._keys.update("Enter tries again, Escape goes back")

    async def _watch(self, node: JoinedNode) -> None:
        """Show how the node gets on, until it is ready.

        Raises:
            TessellaError: it ended, or speaks no HTTP.
        """
        began = time.monotonic()
        api_url = await _waited_for(
            node.api_url(), lambda elapsed_s: self._show(node, {"state": "starting"}, elapsed_s)
        )
        api = AsyncNode(api_url)
        try:
            status: dict[str, Any] = {"state": "starting"}
            while status["state"] in _ON_THE_WAY:
                node.check()
                try:
                    status = await api.status()
                except TransportError:
                    status = {"state": "starting"}
                except TessellaError:
                    return  # it wants a key: whoever attaches asks for that, and sees the rest
                self._show(node, status, time.monotonic() - began)
                await asyncio.sleep(_LOOK_S)
        finally:
            await api.aclose()

    def _show(self, node: JoinedNode, status: Mapping[str, Any], elapsed_s: float) -> None:
        state = shown(status.get("state"), 16)
        steps = " › ".join(f"[{phase}]" if phase == state else phase for phase in _PHASES)
        lines = [f"{steps}   {number(elapsed_s, 0)} s", *node.log_lines(_LOG_LINES)]
        self._progress.update(Content("\n".join(lines)))

    def action_cancel(self) -> None:
        """End the node, if there is one, and go back; once, however often it is asked for."""
        if self._is_ending:
            return
        self._is_ending = True
        self._keys.update("ending the node…")
        self.run_worker(self._cancel(), group="join", exclusive=True)

    async def _cancel(self) -> None:
        if self._node is not None:
            await self._node.leave()
        self.dismiss(None)


async def _waited_for(result: Coroutine[Any, Any, _T], show: Callable[[float], None]) -> _T:
    """What ``result`` gives; until then ``show`` is told again and again for how many seconds it has been waited for."""
    began = time.monotonic()
    task = asyncio.ensure_future(result)
    try:
        while not task.done():
            show(time.monotonic() - began)
            await asyncio.wait({task}, timeout=_LOOK_S)
    finally:
        task.cancel()
    return task.result()


def _shown_lines(text: str) -> str:
    """A few lines from elsewhere."""
    return "\n".join(shown(line, 500) for line in text.splitlines()[:8])
