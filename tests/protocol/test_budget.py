from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from protocol.budget import Budget

SIZE, CONNECTIONS = 64_000, 8
CERTAIN = SIZE // 2 // CONNECTIONS


def test_one_alone_gets_its_own_part_and_half_of_the_common_one():
    budget = Budget(SIZE, connections=CONNECTIONS)
    account = budget.account("here")
    assert not account.take(CERTAIN + SIZE // 4 + 1)
    assert account.take(CERTAIN + SIZE // 4)
    assert not account.take(1)
    assert budget.account("there").room == CERTAIN + SIZE // 8
    account.give(1000)
    assert account.take(500)


def test_connections_of_one_origin_share_what_it_gets():
    budget = Budget(SIZE, connections=CONNECTIONS)
    accounts = [budget.account("here") for _ in range(CONNECTIONS - 1)]
    for account in accounts:
        account.take(account.room)
    assert budget.held == len(accounts) * CERTAIN + SIZE // 4
    assert budget.account("there").room == CERTAIN + SIZE // 8


def test_whoever_comes_last_gets_something_from_many_that_take_all():
    budget = Budget(SIZE, connections=CONNECTIONS)
    for number in range(CONNECTIONS - 1):
        account = budget.account(f"host{number}")
        account.take(account.room)
    last = budget.account("last")
    assert last.room > CERTAIN
    assert last.take(CERTAIN)
    assert budget.held <= SIZE


def test_what_is_borrowed_leaves_room_for_what_is_needed():
    budget = Budget(SIZE, connections=CONNECTIONS)
    account = budget.account("here")
    assert account.borrow(SIZE) == SIZE // 2 // 3
    assert account.borrow(SIZE) == 0
    assert account.room >= CERTAIN + SIZE // 16
    account.repay(1000)
    assert account.borrow(100) == 100
    other = budget.account("there")
    assert other.borrow(SIZE) > SIZE // 10
    assert other.take(CERTAIN)


def test_what_is_begun_on_our_side_may_be_overdrawn():
    budget = Budget(SIZE, connections=CONNECTIONS)
    account = budget.account("here")
    account.overdraw(2 * SIZE)
    assert account.held == 2 * SIZE
    assert not account.take(1)
    account.give(2 * SIZE)
    assert account.take(CERTAIN)


def test_a_closed_account_has_nothing_and_takes_nothing():
    budget = Budget(SIZE, connections=CONNECTIONS)
    account = budget.account("here")
    account.take(CERTAIN + 1)
    account.borrow(1000)
    account.close()
    account.give(100)
    account.overdraw(100)
    account.repay(100)
    assert not account.take(1)
    assert not account.borrow(1)
    assert budget.held == account.held == 0
    assert budget.account("here").room == CERTAIN + SIZE // 4


@given(
    st.lists(
        st.tuples(st.integers(0, CONNECTIONS - 1), st.booleans(), st.floats(-1, 1)),
        max_size=200,
    ),
    st.integers(1, CONNECTIONS),
)
def test_the_bound_holds_and_everybody_always_has_a_part(steps, origins):
    budget = Budget(SIZE, connections=CONNECTIONS)
    accounts = [budget.account(f"host{number % origins}") for number in range(CONNECTIONS)]
    taken, borrowed = [0] * CONNECTIONS, [0] * CONNECTIONS
    for number, lent, part in steps:
        account = accounts[number]
        if part > 0 and lent:
            borrowed[number] += account.borrow(int(part * SIZE))
        elif part > 0:
            count = int(part * account.room)
            assert account.take(count)
            taken[number] += count
        elif lent:
            account.repay(count := int(-part * borrowed[number]))
            borrowed[number] -= count
        else:
            account.give(count := int(-part * taken[number]))
            taken[number] -= count
        assert budget.held == sum(taken) + sum(borrowed) <= SIZE
        assert all(part + account.room >= CERTAIN for part, account in zip(taken, accounts, strict=True))
    for account in accounts:
        account.close()
    assert budget.held == 0
    assert budget.room("host0") == SIZE // 4
