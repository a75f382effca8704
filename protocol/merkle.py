"""A SHA-256 tree over a byte string, so that any range of it can be checked alone.

The string is cut into ranges of `LEAF` bytes, the last one shorter. Leaves and nodes are hashed under different
prefixes (as RFC 6962 does), so that no node passes for a leaf. A node without a sibling moves up as it is. The empty
string has no leaves; its root is the hash of nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

LEAF = 1 << 20
"""Bytes of a full range: large enough that 32 bytes of hash are nothing, small enough to fetch again."""

HASH_SIZE = 32

_LEAF_PREFIX = b"\x00"
_NODE_PREFIX = b"\x01"

Buffer = bytes | bytearray | memoryview


def leaf(data: Buffer) -> bytes:
    """Hash of one range."""
    digest = hashlib.sha256(_LEAF_PREFIX)
    digest.update(data)
    return digest.digest()


def leaf_count(size: int) -> int:
    """Number of ranges of a string of `size` bytes."""
    return -(-size // LEAF)


def leaf_range(index: int, size: int) -> tuple[int, int]:
    """First byte, and first byte after it, of range `index` of a string of `size` bytes.

    Raises:
        ValueError: There is no such range.
    """
    if not 0 <= index < leaf_count(size):
        raise ValueError(f"range {index} of {leaf_count(size)}")
    return index * LEAF, min((index + 1) * LEAF, size)


def leaves(data: Buffer) -> tuple[bytes, ...]:
    """Hashes of all ranges of a byte string. Buffers other than bytes must be flat and contiguous."""
    view = memoryview(data)
    return tuple(leaf(view[start : start + LEAF]) for start in range(0, len(view), LEAF))


def root(leaf_hashes: Sequence[bytes]) -> bytes:
    """Hash of the whole string, from the hashes of its ranges."""
    if not leaf_hashes:
        return hashlib.sha256().digest()
    level = list(leaf_hashes)
    while len(level) > 1:
        pairs = [
            hashlib.sha256(_NODE_PREFIX + left + right).digest()
            for left, right in zip(level[::2], level[1::2], strict=False)
        ]
        level = pairs + level[len(pairs) * 2 :]
    return level[0]


def verify(index: int, data: Buffer, leaf_hashes: Sequence[bytes], size: int) -> bool:
    """Whether `data` is range `index` of the string of `size` bytes that has these leaf hashes.

    The leaf hashes themselves are checked by `root`.
    """
    if len(leaf_hashes) != leaf_count(size) or not 0 <= index < len(leaf_hashes):
        return False
    start, end = leaf_range(index, size)
    return len(data) == end - start and leaf(data) == leaf_hashes[index]
