"""Whose state is the run's."""

import pytest

from optim.standing import Standing, foremost, standings, told_of
from protocol.errors import ProtocolError
from protocol.identity import PeerId

ONE, OTHER = (PeerId(bytes([number]) * 32) for number in (1, 2))


def standing(rounds, history=bytes(16), nonce=0):
    return Standing(rounds, rounds, history, bytes([nonce]) * 8)


def test_the_state_of_most_peers_is_the_runs_but_not_that_of_newcomers():
    with_others, alone = told_of(bytes(16), 1, [ONE, OTHER]), told_of(bytes(16), 1, [ONE])
    many = [standing(1, with_others, nonce) for nonce in (1, 2)]
    told = [standing(0, nonce=3), standing(0, nonce=4), standing(0, nonce=5), standing(9, alone, 6), *many]
    for order in (told, told[::-1]):
        assert foremost(order) == many[1]
    assert foremost(told[:4]) == told[3]
    assert many[0].agrees(many[1])
    assert not many[0].agrees(told[3])


def test_a_history_depends_on_who_contributed_and_not_on_their_order():
    assert told_of(bytes(16), 1, [ONE, OTHER]) == told_of(bytes(16), 1, [OTHER, ONE])
    assert told_of(bytes(16), 1, [ONE, OTHER]) != told_of(bytes(16), 2, [ONE, OTHER])


def test_blocks_that_are_none_are_passed_over():
    one = standing(3)
    assert standings([b"", one.pack(), b"x" * 39]) == [one]
    with pytest.raises(ProtocolError):
        standings([b"?"])
