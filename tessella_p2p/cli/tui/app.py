"""The terminal UI itself: where it is linked to, what is asked and answered, and what the commands do."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Final

from textual import events, work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.content import Content
from textual.timer import Timer
from textual.widgets import Static

from tessella_p2p.base.errors import ConfigurationError, TessellaError, TransportError
from tessella_p2p.cli.asking import Answer, Manner, Turn, chat_question
from tessella_p2p.cli.terminal import printable
from tessella_p2p.cli.tui.asking import Asking
from tessella_p2p.cli.tui.commands import COMMANDS, help_text
from tessella_p2p.cli.tui.keeping import Keeper
from tessella_p2p.cli.tui.linked_app import LinkedApp
from tessella_p2p.cli.tui.node import AsyncNode
from tessella_p2p.cli.tui.prompt import Prompt
from tessella_p2p.cli.tui.remembered import Remembered
from tessella_p2p.cli.tui.screens import AskingScreen, ModelScreen, SwarmScreen
from tessella_p2p.cli.tui.transcript import Kind, Transcript
from tessella_p2p.cli.tui.wishes import Wishes
from tessella_p2p.cli.tui.words import (
    answer_line,
    credits_text,
    explained,
    mesh_line,
    number,
    shown,
    status_text,
    verdict,
    way_line,
)

if TYPE_CHECKING:
    from prompt_toolkit.history import History

_MANNER: Final = Manner(max_tokens=1024, temperature=0.0)
_DRAWS_PER_S: Final = 12


class TessellaUi(LinkedApp):
    """The app; arguments as those of `LinkedApp`."""

    TITLE = "Tessella"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    Screen { background: $background; }
    #head { height: 1; padding: 0 1; background: $primary 20%; text-wrap: nowrap; text-overflow: ellipsis; }
    #hint { height: 1; padding: 0 1; color: $text-muted; display: none; text-wrap: nowrap; text-overflow: ellipsis; }
    #hint.shown { display: block; }
    #line { height: auto; border-top: solid $primary; padding: 0 1; }
    #mark { width: 2; height: 1; }
    #foot, #way { height: 1; padding: 0 1; color: $text-muted; text-wrap: nowrap; text-overflow: ellipsis; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+c", "interrupt", show=False, priority=True),
        Binding("escape", "stop_answer", show=False),
        Binding("ctrl+q", "quit", show=False, priority=True),
    ]

    def __init__(self, wishes: Wishes, remembered_path: Path, environ: Mapping[str, str]) -> None:
        super().__init__(wishes, remembered_path, environ)
        self._history: History | None = None
        self._head, self._foot, self._way = Static(id="head"), Static(id="foot"), Static(id="way")
        self._hint = Static(id="hint")
        self._transcript = Transcript()
        self._prompt = Prompt(tuple(COMMANDS), id="prompt")
        self._model: str | None = None
        self._turns: tuple[Turn, ...] = ()
        self._asking: Asking | None = None
        self._keeper = Keeper()
        self._ticking: Timer
        self._acts: Mapping[str, Callable[[str], Awaitable[None]]] = {
            "/swarm": self.show_swarm,
            "/model": self.choose_model,
            "/status": self.show_status,
            "/credits": self.show_credits,
            "/new": self.begin_anew,
            "/save": self.save,
            "/connect": self.connect,
            "/help": self.help,
            "/quit": self.leave,
        }

    def compose(self) -> ComposeResult:
        """From top to bottom."""
        yield self._head
        yield self._transcript
        yield self._hint
        with Horizontal(id="line"):
            yield Static("> ", id="mark")
            yield self._prompt
        yield self._foot
        yield self._way

    def on_mount(self) -> None:
        """Link to a node, and ask where if nobody has said it."""
        self._ticking = self.set_interval(1 / _DRAWS_PER_S, self._tick, pause=True)
        self._prompt.focus()
        self._show_head()
        self._read_history()
        self.go(first=True)

    @work
    async def _read_history(self) -> None:
        from tessella_p2p.cli.question_history import question_history  # it takes as long as everything else here

        self._history = await asyncio.to_thread(question_history)
        self._prompt.recall(list(await asyncio.to_thread(self._history.load_history_strings))[::-1])

    async def on_unmount(self) -> None:
        """Close the connections."""
        self.action_stop_answer()
        if self.node is not None:
            await self.node.aclose()

    async def on_event(self, event: events.Event) -> None:
        """What is pasted, into whichever field, is text: it does not drive the terminal that shows it."""
        if isinstance(event, events.Paste):
            event.text = printable(event.text.replace("\r\n", "\n").replace("\r", "\n"))
        await super().on_event(event)

    # ---- the node ----

    async def say(self, text: str, kind: Kind) -> None:
        """Add a text to the conversation."""
        await self._transcript.say(text, kind)

    def node_linked(self, node: AsyncNode) -> None:
        """Another node answers for other models."""
        self._model = None
        self._find_model(node)
        self.mesh_seen()
        self._prompt.focus()

    def mesh_seen(self) -> None:
        """Show how it stands."""
        self._show_head()
        self._show_foot()

    @work(exclusive=True, group="model")
    async def _find_model(self, node: AsyncNode) -> None:
        with suppress(TessellaError):  # the head of the screen says what is wrong, and who asks something is told
            await self._model_now(node)

    async def _model_now(self, node: AsyncNode) -> str:
        """The model that is asked: the one wished for, or the first that the node can answer with.

        Raises:
            NoRoute: there is none.
            TessellaError: the node does not answer.
        """
        if self._model is None:
            wished = self.wishes.model_id
            if wished is None:
                models = await node.model_ids()
                kept = self.wishes.remembered.model_id
                wished = kept if kept is not None and kept in models else models[0]
            self._model = wished
            self._show_head()
        return self._model

    # ---- questions and answers ----

    def on_prompt_sent(self, event: Prompt.Sent) -> None:
        """Ask, or do what a command says."""
        text = event.text
        if self._history is not None:
            self._history.append_string(text)
        self._hint.remove_class("shown")
        if text.startswith("/"):
            self._obey(text)
        elif self.node is None:
            self._give_back(text, "no node is linked yet; /connect chooses one")
        elif self._asking is not None:
            self._give_back(text, "an answer is under way: Escape stops it")
        else:
            self._begin(self.node, text.removeprefix(" ") if text.startswith(" /") else text)

    def _give_back(self, text: str, why: str) -> None:
        with self._prompt.prevent(Prompt.Changed):  # what it changes to would take the hint away
            self._prompt.put(text)
        self._say_hint(why)

    def _begin(self, node: AsyncNode, text: str) -> None:
        """Ask; it is under way at once, so that of two questions in one breath the second one waits."""
        asking = Asking()
        asking.stream = asyncio.create_task(self._stream(node, (*self._turns, Turn("user", text)), asking))
        self._asking = asking
        self._answer(asking, text)

    @work(group="answer")
    async def _answer(self, asking: Asking, text: str) -> None:
        """See an answer through; one that the conversation has left behind (`begin_anew`) leaves no trace."""
        assert asking.stream is not None
        try:
            await self.say(text, "question")
            if asking is self._asking:
                await self._transcript.begin_answer(asking.view)
            if asking is self._asking:
                self._ticking.resume()
                self._show_foot()
            await asyncio.wait({asking.stream})
        finally:
            asking.stop()
            is_left_behind = asking is not self._asking
            if not is_left_behind:
                self._asking = None
                self._ticking.pause()
        if not is_left_behind:
            asking.view.draw()
            await self._conclude(asking, text)
            self._show_foot(asking.answer)

    async def _stream(self, node: AsyncNode, turns: tuple[Turn, ...], asking: Asking) -> None:
        await asking.read(node, chat_question(await self._model_now(node), turns, _MANNER))

    async def _conclude(self, asking: Asking, text: str) -> None:
        """What becomes of the answer: all of it is kept, also where the user stopped it; one that failed is not."""
        answer, stream = asking.answer, asking.stream
        assert stream is not None
        error = None if stream.cancelled() else stream.exception()
        if isinstance(error, TessellaError):
            part = "\nThis answer is not part of the conversation." if answer.text else ""
            await self.say(f"{explained(error)}{part}\nUp brings the question back.", "error")
            return
        if error is not None:
            raise error  # a bug of ours
        if answer.text:
            self._turns = (*self._turns, Turn("user", text), Turn("assistant", answer.text))
        if stream.cancelled():
            await self.say("stopped", "note")
        elif answer.reason == "length":
            limit = number(answer.usage.get("completion_tokens", _MANNER.max_tokens), 0)
            await self.say(f"cut at {limit} tokens; ask it to go on", "note")
        elif not answer.text:
            await self.say("the model had nothing to say", "note")

    def _tick(self) -> None:
        asking = self._asking
        if asking is not None:
            asking.view.draw()
            self._show_foot()

    # ---- what stands around the conversation ----

    def _show_head(self) -> None:
        parts = ["Tessella"]
        if self.node is not None:
            parts += [shown(self._model or "no model yet", 40), self.lost or self._standing(), self.node.api_url]
        self._head.update(Content(" · ".join(parts)))

    def _standing(self) -> str:
        picture = self.picture
        if picture is None:
            return "looking"
        holes = picture.coverage[0].holes if picture.coverage else ()
        stages = picture.num_stages
        return f"{verdict(picture.model, holes)} · {stages} stage{'s' * (stages != 1)}"

    def _show_foot(self, done: Answer | None = None) -> None:
        """While an answer comes: how it gets on. After it: what it was, until the next one."""
        asking = self._asking
        if asking is not None:
            self._foot.update(Content(asking.progress(self.lost)))
            self._way.update(Content("Escape stops it"))
        elif done is not None and done.report:
            self._keeper.hold(answer_line(done, self._model or ""), way_line(done))
        if asking is None:
            idle = mesh_line(self.picture) if self.picture is not None else ""
            foot, way = self._keeper.lines(idle)
            self._foot.update(Content(foot))
            self._way.update(Content(way))

    def on_text_area_changed(self) -> None:
        """Say which commands begin like this, or what the one does that is typed."""
        found = self._prompt.completions()
        named = COMMANDS.get(found[0] if len(found) == 1 else self._prompt.text.partition(" ")[0])
        if named is not None:
            self._say_hint(f"{named.usage}  {named.help}")
        elif found:
            self._say_hint("  ".join(found))
        else:
            self._hint.remove_class("shown")

    def _say_hint(self, text: str) -> None:
        self._hint.update(Content(text))
        self._hint.add_class("shown")

    def on_prompt_left(self) -> None:
        """Leave."""
        self.exit()

    def on_prompt_scrolled(self, event: Prompt.Scrolled) -> None:
        """Scroll the conversation."""
        move: dict[str, Callable[[], None]] = {
            "page_up": lambda: self._transcript.scroll_page_up(animate=False),
            "page_down": lambda: self._transcript.scroll_page_down(animate=False),
            "home": lambda: self._transcript.scroll_home(animate=False),
            "end": self._transcript.anchor,
        }
        move[event.where]()

    def action_interrupt(self) -> None:
        """Ctrl-C: copy what is selected, stop the answer, drop what is typed; it never leaves by accident."""
        if isinstance(self.screen, AskingScreen):
            self.screen.action_cancel()
        elif self.screen.get_selected_text():
            self.screen.action_copy_text()
        elif self._prompt.selected_text:
            self._prompt.action_copy()
        elif self._asking is not None:
            self.action_stop_answer()
        elif self._prompt.text:
            self._prompt.put("")
        else:
            self._say_hint("Ctrl-D or /quit leaves")

    def action_stop_answer(self) -> None:
        """End the answer that is under way; closing its stream ends it at the node, and on every stage."""
        if self._asking is not None:
            self._asking.stop()

    # ---- commands ----

    @work(group="command")
    async def _obey(self, line: str) -> None:
        name, _, argument = line.partition(" ")
        command = COMMANDS.get(name)
        try:
            if command is None:
                await self.say(f"{shown(name)} is no command; /help lists them", "error")
            elif command.takes_argument or not argument.strip():
                await self._acts[name](argument.strip())
            else:
                await self.say(f"{name} takes nothing after it", "error")
        except TessellaError as error:
            await self.say(explained(error), "error")

    def _linked_node(self) -> AsyncNode:
        if self.node is None:
            raise TransportError("no node is linked yet")
        return self.node

    async def show_swarm(self, _: str) -> None:
        """``/swarm``."""
        if isinstance(self.screen, SwarmScreen):
            return  # asked for twice in one breath
        screen = SwarmScreen(self.numbers)
        await self.push_screen(screen)
        if self.picture is not None:
            screen.show(self.picture)
        if self.lost:
            screen.lose(self.lost)

    async def choose_model(self, name: str) -> None:
        """``/model``: by name, or from a list."""
        node = self._linked_node()
        models = await node.model_ids()
        chosen: str | None = name or await self.push_screen_wait(ModelScreen(models, self._model))
        if chosen is None:
            return
        if chosen not in models:
            raise ConfigurationError(
                f"{shown(chosen)} is not answered here now; there is {', '.join(map(shown, models[:8]))}"
            )
        self._model = chosen
        if self.wishes.remembered != Remembered():
            self.keep(replace(self.wishes.remembered, model_id=chosen))
        self._show_head()
        await self.say(f"{shown(chosen)} is asked from now on; the conversation goes on", "note")

    async def show_status(self, _: str) -> None:
        """``/status``."""
        node = self._linked_node()
        await self.say(status_text(await node.status(), node.api_url), "note")

    async def show_credits(self, _: str) -> None:
        """``/credits``."""
        await self.say(credits_text(await self._linked_node().status()), "note")

    async def begin_anew(self, _: str) -> None:
        """``/new``."""
        self.action_stop_answer()
        self._asking = None
        self._ticking.pause()
        self._turns = ()
        self._keeper = Keeper()
        await self._transcript.clear()
        self._show_foot()

    async def save(self, name: str) -> None:
        """``/save FILE``."""
        if not name:
            raise ConfigurationError(
                "/save FILE: a .json file is one that `tessella-p2p chat --session-file` goes on with"
            )
        path = await asyncio.to_thread(self._keeper.save, name, self._model, self._turns)
        await self.say(f"saved: {path}", "note")

    async def connect(self, _: str) -> None:
        """``/connect``."""
        self.action_stop_answer()
        self.go(first=False)

    async def help(self, _: str) -> None:
        """``/help``."""
        await self.say(help_text(), "note")

    async def leave(self, _: str) -> None:
        """``/quit``."""
        self.exit()
