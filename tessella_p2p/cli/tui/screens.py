"""What is asked on a screen of its own: where to go, an API key, a model; and the live picture of the swarm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, TypeVar

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Input, OptionList, Static

from tessella_p2p.base.errors import ConfigurationError
from tessella_p2p.cli.terminal import printable
from tessella_p2p.cli.tui.goal import Goal, goal_of
from tessella_p2p.cli.tui.picture import Picture
from tessella_p2p.cli.tui.swarm import Numbers, swarm_picture
from tessella_p2p.cli.tui.words import shown

BOX = """
    align: center middle;
    & > Vertical { width: 76; max-width: 100%; height: auto; max-height: 100%; border: round $primary; padding: 0 1; }
    & Static { height: auto; }
    & Input { border: none; height: 1; padding: 0; margin: 0 0 1 0; background: $surface; }
    & Input:focus { border: none; text-style: underline; }
    & .said { color: $text-error; }
    & .keys { color: $text-muted; }
"""
_ResultT = TypeVar("_ResultT")


class AskingScreen(ModalScreen[_ResultT | None]):
    """A screen that can be left without an answer."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "cancel", show=False)]

    def action_cancel(self) -> None:
        """Leave it all as it was."""
        self.dismiss(None)


class ConnectScreen(AskingScreen[Goal]):
    """Asks where to go.

    Args:
        address: what stands in the field at first.
        operator: the operator's key that stands there.
        said: why it is asked again, or what is known.
    """

    DEFAULT_CSS = f"ConnectScreen {{ {BOX} }}"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("down", "app.focus_next", show=False),
        Binding("up", "app.focus_previous", show=False),
    ]

    def __init__(self, address: str, operator: str, said: str) -> None:
        super().__init__()
        self._address = Input(address, placeholder="http://HOST:PORT or /ip4/HOST/tcp/PORT/p2p/PEER_ID", id="address")
        self._operator = Input(operator, placeholder="12D3KooW…", id="operator")
        self._said = Static(Content(printable(said)), classes="said")

    def compose(self) -> ComposeResult:
        """The two fields."""
        with Vertical():
            yield Static(Content.styled("Which mesh?", "bold"))
            yield Static(
                Content(
                    "The address of a running node (http://…) is attached to; with the address of a mesh's "
                    "orchestrator, as its operator gives it, this machine joins.\n"
                )
            )
            yield Static("Address")
            yield self._address
            yield Static("Operator's public key (its peer id), if the address lacks it")
            yield self._operator
            yield self._said
            yield Static("Enter goes on, Up and Down change the field, Escape leaves", classes="keys")

    def on_input_submitted(self) -> None:
        """Go on, if what was typed has a form."""
        try:
            goal = goal_of(self._address.value, self._operator.value)
        except ConfigurationError as error:
            self._said.update(Content(shown(error, 500)))
            if not self._operator.value.strip() and "who it is" in str(error):
                self._operator.focus()
            return
        self.dismiss(goal)


class KeyScreen(AskingScreen[str]):
    """Asks for an API key; ``said`` is why, and ``is_kept`` whether it will be remembered."""

    DEFAULT_CSS = f"KeyScreen {{ {BOX} }}"

    def __init__(self, api_url: str, said: str, *, is_kept: bool) -> None:
        super().__init__()
        self._api_url = api_url
        self._kept = "kept in ui.toml" if is_kept else "not kept"
        self._said = said
        self._key = Input(placeholder="tsl-…", password=True, id="key")

    def compose(self) -> ComposeResult:
        """One field that does not show what is typed."""
        with Vertical():
            yield Static(Content.styled(f"{shown(self._api_url, 200)} asks for an API key", "bold"))
            yield Static(Content(f"{shown(self._said, 300)}\n"))
            yield self._key
            yield Static(
                f"Enter goes on, Escape leaves. The key is {self._kept}, and sent to this node only.", classes="keys"
            )

    def on_input_submitted(self) -> None:
        """Give the key."""
        self.dismiss(self._key.value.strip() or None)


class ModelScreen(AskingScreen[str]):
    """Asks which of the ``models`` is asked from now on; ``current`` is marked."""

    DEFAULT_CSS = f"""
    ModelScreen {{
        {BOX}
        & OptionList, & OptionList:focus {{ height: auto; max-height: 12; border: none; }}
    }}
    """

    def __init__(self, models: Sequence[str], current: str | None) -> None:
        super().__init__()
        self._models = tuple(models)
        self._current = current

    def compose(self) -> ComposeResult:
        """The list."""
        options = [Content(f"{'* ' if model == self._current else '  '}{shown(model, 120)}") for model in self._models]
        with Vertical():
            yield Static(Content.styled("Which model?", "bold"))
            yield OptionList(*options)
            yield Static("Up and Down choose, Enter takes, Escape leaves it as it is", classes="keys")

    def on_mount(self) -> None:
        """The current one is where the choice begins."""
        options = self.query_one(OptionList)
        options.highlighted = self._models.index(self._current) if self._current in self._models else 0
        options.focus()

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        """Take it."""
        self.dismiss(self._models[event.option_index])


class SwarmScreen(AskingScreen[None]):
    """The mesh, live and anonymous; ``numbers`` stand for its peers."""

    DEFAULT_CSS = """
    SwarmScreen {
        & > VerticalScroll { width: 100%; height: 1fr; padding: 0 1; }
        & Static { height: auto; }
        & > .keys { dock: bottom; height: 1; padding: 0 1; color: $text-muted; }
        & .said { color: $text-error; }
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [Binding("q", "cancel", show=False)]

    def __init__(self, numbers: Numbers) -> None:
        super().__init__()
        self._numbers = numbers
        self._picture: Picture | None = None
        self._drawn = Static(Content("waiting for the first picture…"))
        self._said = Static(Content(""), classes="said")

    def compose(self) -> ComposeResult:
        """The picture, in a part that scrolls."""
        with VerticalScroll():
            yield self._said
            yield self._drawn
        yield Static("live · peers are numbered, not named · arrows scroll, Escape leaves", classes="keys")

    def on_mount(self) -> None:
        """Keys scroll."""
        self.query_one(VerticalScroll).focus()

    def show(self, picture: Picture) -> None:
        """Draw another moment."""
        self._picture = picture
        self._said.update(Content(""))
        self._draw()

    def lose(self, said: str) -> None:
        """Say that no newer picture comes, and why."""
        self._said.update(Content(said if self._picture is None else f"{said}; this is the last picture"))

    def on_resize(self, event: events.Resize) -> None:
        """Draw for another width."""
        self._draw()

    def _draw(self) -> None:
        width = self.size.width - 4  # padding and the scroll bar
        if self._picture is not None and width > 0:
            self._drawn.update(swarm_picture(self._picture, width, self._numbers))
