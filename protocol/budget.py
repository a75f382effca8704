"""One bound on what an endpoint keeps for all others together, shared so that nobody can use it up. Without IO.

Half of the budget is divided evenly: so much is certain for each connection, however many others do their worst. The
other half is common. Of that, the connections of one origin together may hold as much as is left free, and no more: one
origin gets a half of it, two a third each, and n of them leave a part in n + 1 for whoever comes next (Choudhury and
Hahne, "Dynamic Queue Length Thresholds for Shared-Memory Packet Switches", 1998). What only makes things faster is
borrowed: that ends at half of what is left free, so that it never takes the place of what is needed.
"""

from __future__ import annotations

from collections import Counter


class Budget:
    """The bytes that an endpoint keeps of what others sent, or did not take.

    Args:
        size: All of them.
        connections: The most connections that there are, among which the one half is divided.
    """

    def __init__(self, size: int, *, connections: int) -> None:
        self.certain = size // 2 // connections
        """Bytes that each account has for itself."""
        self._common = size - size // 2
        self._used: Counter[str] = Counter()  # bytes of the common half, by origin
        self._all_used = 0
        self._held = 0

    @property
    def held(self) -> int:
        """Bytes taken and not given back."""
        return self._held

    def account(self, origin: str) -> Account:
        """The account of a new connection.

        Args:
            origin: What it is counted under, see `door.origin`.
        """
        return Account(self, origin)

    def room(self, origin: str) -> int:
        """Bytes of the common half that an origin may still take."""
        return max(0, (self._common - self._all_used - self._used[origin]) // 2)

    def loan(self, origin: str) -> int:
        """Bytes of it that an origin may still borrow."""
        return max(0, (self._common - self._all_used - 2 * self._used[origin]) // 3)

    def change(self, origin: str, *, held: int, common: int) -> None:
        """Counts what an account has taken or given back, and how much of that belongs to the common half."""
        self._held += held
        self._all_used += common
        self._used[origin] += common
        if not self._used[origin]:
            del self._used[origin]


class Account:
    """What one connection has of the budget. Made by `Budget.account`."""

    def __init__(self, budget: Budget, origin: str) -> None:
        self._budget = budget
        self._origin = origin
        self._taken = 0
        self._borrowed = 0
        self._closed = False

    @property
    def held(self) -> int:
        """Bytes taken or borrowed, and not given back."""
        return self._taken + self._borrowed

    @property
    def room(self) -> int:
        """Bytes that can be taken now."""
        if self._closed:
            return 0
        return max(0, self._budget.certain - self._taken) + self._budget.room(self._origin)

    def take(self, count: int) -> bool:
        """Takes so many bytes, or, if there are not so many, none and returns False."""
        if count > self.room:
            return False
        self._change(count)
        return True

    def overdraw(self, count: int) -> None:
        """Takes bytes whether or not they are there: for what this side began itself, which has bounds of its own."""
        self._change(count)

    def give(self, count: int) -> None:
        """Gives bytes back that were taken."""
        self._change(-count)

    def borrow(self, count: int) -> int:
        """Borrows as many bytes as can be spared, at most `count`; returns how many."""
        count = 0 if self._closed else min(count, self._budget.loan(self._origin))
        self._borrowed += count
        self._budget.change(self._origin, held=count, common=count)
        return count

    def repay(self, count: int) -> None:
        """Gives bytes back that were borrowed."""
        if not self._closed:
            self._borrowed -= count
            self._budget.change(self._origin, held=-count, common=-count)

    def close(self) -> None:
        """Gives everything back, for good. The account takes nothing any more."""
        self.repay(self._borrowed)
        self._change(-self._taken)
        self._closed = True

    def _change(self, count: int) -> None:
        if self._closed:
            return
        before = max(0, self._taken - self._budget.certain)
        self._taken += count
        after = max(0, self._taken - self._budget.certain)
        self._budget.change(self._origin, held=count, common=after - before)
