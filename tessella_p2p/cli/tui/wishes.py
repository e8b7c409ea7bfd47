"""What is known before anything is asked, and what follows from it; pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from tessella_p2p.cli.client_file import ClientFile
from tessella_p2p.cli.options import DEFAULT_API_URL
from tessella_p2p.cli.tui.goal import Goal, goal_of
from tessella_p2p.cli.tui.remembered import Remembered


@dataclass(frozen=True, slots=True)
class Wishes:
    """What flags, variables and files say before anything is asked.

    Attributes:
        api_url, api_key, model_id, mesh: of flags and variables; None where there is none. They win, and are not remembered.
        remembered: what was answered last time.
        client: what the client's file says; it counts where nobody has answered yet.
        known_mesh: the orchestrator of this machine's own node; it is proposed.
    """

    api_url: str | None = None
    api_key: str | None = None
    model_id: str | None = None
    mesh: str | None = None
    remembered: Remembered = field(default_factory=Remembered)
    client: ClientFile = field(default_factory=ClientFile)
    known_mesh: str | None = None

    def goal(self) -> Goal | None:
        """Where to go without asking; None where nobody has said it.

        Raises:
            ConfigurationError: a wish is no address.
        """
        kept = self.remembered
        if self.api_url is not None:
            is_same = self.api_url.rstrip("/") == kept.api_url
            return goal_of(self.api_url, kept.operator or "" if is_same else "")
        if self.mesh is not None:
            return goal_of(self.mesh, "")
        address = kept.api_url or kept.mesh
        if address is not None:
            return goal_of(address, kept.operator or "")
        return goal_of(self.client.api_url, "") if self.client.api_url is not None else None

    def key_for(self, api_url: str) -> str | None:
        """What a node is sent as an API key: each one only where it was meant to go."""
        if self.api_key is not None and api_url == (self.api_url or self.remembered.api_url or api_url).rstrip("/"):
            return self.api_key
        kept_for = self.remembered.api_url or DEFAULT_API_URL  # of a mesh that was joined, this machine's node
        if api_url == kept_for and self.remembered.api_key is not None:
            return self.remembered.api_key
        is_clients = api_url == (self.client.api_url or DEFAULT_API_URL).rstrip("/")
        return self.client.api_key if is_clients else None
