"""What a client reads of an answer, whatever the tokens are that it is made of: whole characters, no stop string, nothing lost."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from tessella_p2p.entry.text import AnswerText

END = 0
"""The end token; token ``i`` of the others stands for the ``i``-th of some pieces of bytes."""


class PieceDecoder:
    """A decoder over pieces of bytes, as a tokenizer's: a character may be spread over several."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._pieces = pieces
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        return self._decoder.decode(self._pieces[token_id - 1])

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


@dataclass(frozen=True)
class Read:
    deltas: tuple[str, ...]
    token_ids: tuple[int, ...]
    reason: str

    @property
    def text(self) -> str:
        return "".join(self.deltas)


def read(pieces: Sequence[bytes], stops: Sequence[str] = (), max_tokens: int | None = None) -> Read:
    """The answer that consists of ``pieces`` and then the end token."""
    answer = AnswerText(PieceDecoder(pieces), stops, {END}, max_tokens or len(pieces) + 1)
    deltas: list[str] = []
    for token_id in (*range(1, len(pieces) + 1), END):
        text = answer.push(token_id)
        if text is not None:
            deltas.append(text)
        if answer.reason is not None:
            break
    rest, reason = answer.end()
    return Read((*deltas, rest), tuple(answer.token_ids), reason)


def cut(data: bytes, cuts: Sequence[int]) -> list[bytes]:
    """``data`` in pieces of those lengths; what is left is the last one."""
    pieces: list[bytes] = []
    for size in cuts:
        pieces.append(data[:size])
        data = data[size:]
    return [*pieces, data]


ALPHABET = "ab<|>é€😀"
texts = st.text(ALPHABET, max_size=24)
cuts = st.lists(st.integers(0, 5), max_size=16)
stops = st.lists(st.text(ALPHABET, min_size=1, max_size=4), max_size=4)


def up_to_stop(text: str, words: Sequence[str]) -> tuple[str, bool]:
    """What is to be shown: the text before the stop string that is complete first, of two the longer; and whether there is one."""
    for end in range(len(text) + 1):
        begins = [end - len(word) for word in words if text[:end].endswith(word)]
        if begins:
            return text[: min(begins)], True
    return text, False


@given(texts, cuts, stops)
def test_any_split_of_a_text_into_tokens_shows_the_same(text: str, sizes: list[int], words: list[str]) -> None:
    pieces = cut(text.encode(), sizes)
    shown, is_stopped = up_to_stop(text, words)

    answer = read(pieces, words)

    assert answer.text == shown
    assert "\ufffd" not in answer.text
    assert not any(word in answer.text for word in words)
    assert answer.reason == "stop"
    assert is_stopped or answer.token_ids == tuple(range(1, len(pieces) + 1))  # and never the end token


@given(texts, cuts, stops)
def test_no_delta_goes_ahead_of_what_is_certain(text: str, sizes: list[int], words: list[str]) -> None:
    shown, _ = up_to_stop(text, words)
    so_far = ""
    for delta in read(cut(text.encode(), sizes), words).deltas:
        so_far += delta
        assert shown.startswith(so_far)


@given(texts, cuts, stops, st.integers(1, 20))
def test_an_answer_at_its_limit_says_length_unless_a_stop_or_the_end_came_first(
    text: str, sizes: list[int], words: list[str], max_tokens: int
) -> None:
    pieces = cut(text.encode(), sizes)
    taken = pieces[:max_tokens]
    shown, is_stopped = up_to_stop(b"".join(taken).decode("utf-8", "replace"), words)

    answer = read(pieces, words, max_tokens)

    assert answer.text == shown
    assert answer.reason == ("stop" if is_stopped or len(pieces) < max_tokens else "length")
    assert len(answer.token_ids) <= max_tokens


@given(st.lists(st.binary(max_size=4), max_size=12), stops)
def test_bytes_that_are_no_text_show_as_if_they_came_at_once(pieces: list[bytes], words: list[str]) -> None:
    shown, _ = up_to_stop(b"".join(pieces).decode("utf-8", "replace"), words)

    assert read(pieces, words).text == shown


def test_a_character_over_three_tokens_comes_once_and_whole() -> None:
    answer = read([b"a\xf0", b"\x9f\x98", b"\x80b"])

    assert answer.deltas == ("a", "", "😀b", "")


def test_a_character_that_is_cut_off_at_the_end_is_one_replacement() -> None:
    answer = read([b"a", b"\xf0\x9f"], max_tokens=2)

    assert (answer.text, answer.reason) == ("a\ufffd", "length")


def test_of_overlapping_stops_the_one_that_is_complete_first_counts_in_any_split() -> None:
    whole, split = read([b"xabcd"], ["abcd", "bc"]), read([b"xa", b"b", b"cd"], ["abcd", "bc"])

    assert whole.text == split.text == "xa"


def test_a_stop_inside_a_token_keeps_what_is_before_it() -> None:
    answer = read([b"yes STOP no", b"more"], ["STOP"])

    assert (answer.text, answer.reason, answer.token_ids) == ("yes ", "stop", (1,))


def test_what_could_have_become_a_stop_is_shown_at_the_end() -> None:
    answer = read([b"no ", b"ST", b"O"], ["STOP"])

    assert answer.deltas == ("no ", "", "", "STO")
