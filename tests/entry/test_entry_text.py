"""Stop strings never leak, and nothing else is lost."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tessella_p2p.entry.text import StopFilter

ALPHABET = "ab<|>"
pieces = st.lists(st.text(ALPHABET, max_size=4), max_size=12)
stops = st.lists(st.text(ALPHABET, min_size=1, max_size=4), max_size=3)


@given(pieces, stops)
def test_shown_text_is_the_text_up_to_the_first_stop(parts: list[str], words: list[str]) -> None:
    whole = "".join(parts)
    ends = []
    for size in range(len(whole) + 1):  # the first moment at which any stop is complete
        found = [at for word in words if (at := whole[:size].find(word)) >= 0]
        if found:
            ends.append(min(found))
            break
    matcher = StopFilter(words)
    shown = ""
    for part in parts:
        for character in part:
            shown += matcher.feed(character)
            assert not any(word in shown for word in words)
    shown += matcher.flush()
    assert shown == (whole[: ends[0]] if ends else whole)


@given(pieces, stops)
def test_pieces_give_the_same_text_as_characters_up_to_the_stop(parts: list[str], words: list[str]) -> None:
    matcher = StopFilter(words)
    shown = "".join(matcher.feed(part) for part in parts) + matcher.flush()
    whole = "".join(parts)
    assert whole.startswith(shown)
    assert not any(word in shown for word in words)
    if not any(word in whole for word in words):
        assert shown == whole


def test_a_stop_over_several_pieces_is_never_shown() -> None:
    matcher = StopFilter(["<|im_end|>"])
    shown = "".join(matcher.feed(part) for part in ("Paris", ".<|", "im_", "end", "|> more"))
    assert (shown, matcher.stopped) == ("Paris.", True)


def test_held_text_is_flushed_at_the_end() -> None:
    matcher = StopFilter(["STOP"])
    assert matcher.feed("no ST") == "no "
    assert matcher.flush() == "ST"
