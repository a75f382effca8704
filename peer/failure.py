"""The one error that people are told, out of the groups in which nurseries wrap what their tasks raise."""

from __future__ import annotations

import trio

from protocol.errors import ShoalError


def first_cause(error: BaseException) -> BaseException:
    """The first of Shoal's own errors in a group, or else the first that is no cancellation, or else the first."""
    leaves: list[BaseException] = []
    pending = [error]
    while pending:
        each = pending.pop(0)
        if isinstance(each, BaseExceptionGroup):
            pending[:0] = each.exceptions
        else:
            leaves.append(each)
    own = [leaf for leaf in leaves if isinstance(leaf, ShoalError)]
    others = [leaf for leaf in leaves if not isinstance(leaf, trio.Cancelled)]
    return [*own, *others, *leaves][0]
