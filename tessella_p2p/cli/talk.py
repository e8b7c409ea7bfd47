"""A conversation with a model, kept in a file where there is one."""

from __future__ import annotations

from pathlib import Path

from tessella_p2p.cli.asking import Answer, Turn, chat_question
from tessella_p2p.cli.prompting import Asker
from tessella_p2p.cli.session_file import Conversation, check_place, load_session, save_session


class Talk:
    """What was said, and who goes on with it.

    Args:
        asker: asks and shows.
        conversation: what was said before.
        session_file: where all of it is kept; None to forget it.
    """

    def __init__(self, asker: Asker, conversation: Conversation, session_file: Path | None) -> None:
        self.asker = asker
        self.conversation = conversation
        self._session_file = session_file

    def say(self, text: str) -> None:
        """Ask the next question.

        An answer that is interrupted is kept as far as it was shown; one that fails is not, and neither is its question.

        Raises:
            TessellaError: the node refused or could not go on, or the file cannot be written.
            KeyboardInterrupt: the user stopped the answer.
        """
        answer = Answer()
        turns = (*self.conversation.turns, Turn("user", text))
        try:
            self.asker.ask(chat_question(self.asker.model, turns, self.asker.manner), answer)
        except KeyboardInterrupt:
            self._keep(turns, answer)
            raise
        self._keep(turns, answer)

    def _keep(self, turns: tuple[Turn, ...], answer: Answer) -> None:
        if answer.text:
            self._replace((*turns, Turn("assistant", answer.text)))

    def forget(self) -> None:
        """Begin anew; what the file's owner wrote there as the system's message stays."""
        self._replace(tuple(turn for turn in self.conversation.turns[:1] if turn.role == "system"))

    def take_back(self) -> str | None:
        """Drop the last question and what followed; the question, or None where there was none."""
        turns = self.conversation.turns
        asked = next((index for index in reversed(range(len(turns))) if turns[index].role == "user"), None)
        if asked is None:
            return None
        self._replace(turns[:asked])
        return turns[asked].content

    def _replace(self, turns: tuple[Turn, ...]) -> None:
        self.conversation = Conversation(self.asker.model, turns)
        if self._session_file is not None:
            save_session(self._session_file, self.conversation)


def begun(session_file: Path | None) -> Conversation:
    """The conversation in a session file; an empty one where there is none.

    Raises:
        ConfigurationError: see `session_file.load_session` and `session_file.check_place`.
    """
    if session_file is None:
        return Conversation()
    check_place(session_file)
    return load_session(session_file)
