"""What a client is told about its route, out of the times of its tokens."""

from __future__ import annotations

from tessella_p2p.entry.plan import Token
from tessella_p2p.entry.report import Timing
from tessella_p2p.stages.engine import Sampled


def token(number: int) -> Token:
    return Token(Sampled(number), number, ())


def test_a_long_answer_tells_of_its_last_steps_while_it_goes_on_and_of_its_first_ones_at_the_end() -> None:
    timing = Timing(began=0.0)
    for number in range(5000):
        timing.note(token(number), float(number))
    assert [each.wall_us for each in timing.recent()] == list(range(4968, 5000))
    assert [each.wall_us for each in timing.decode] == list(range(1, 4097))  # the first token is the prompt's


def test_behind_a_reroute_only_the_new_route_is_told_of() -> None:
    timing = Timing(began=0.0)
    timing.note(token(1), 1.0)
    assert timing.recent() == [token(1)]
    timing.note(token(2), 2.0)
    timing.reroute()
    assert not timing.recent()
    timing.note(token(3), 3.0)
    assert timing.recent() == [token(3)]
    assert not timing.decode
