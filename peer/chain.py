"""The chain of headers that vouches for a run's states, one for each revision, and for what was contributed to them.

A header's digest hashes the digest before it, the plan that made the revision, who contributed how much, the weight
accumulated on this branch, and the Merkle root of the outer state's bytes. Two peers with equal digests hold the same
bits and the same history.

A `Link` leads from one header to the next. It has what the next header does not say: the contributors' signatures. So
whoever has a header and the links from there on can tell how much was contributed since, and by whom.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Sequence
from functools import cached_property

import attrs

from protocol.errors import ProtocolError
from protocol.weights import SIZE, SignedWeight

DIGEST_DOMAIN = b"shoal-state-v1"
CONTRIBUTIONS_DOMAIN = b"shoal-contributions-v1"

_LINK = struct.Struct(">32s32sI")
_CONTRIBUTION = struct.Struct(f">d{SIZE}s")

EMPTY_LINK = _LINK.size
"""Bytes of a packed link without contributions."""


@attrs.frozen
class Tip:
    """Where a peer's branch ends: its revision, the weight behind it, and its digest."""

    revision: int
    weight: float
    digest: bytes

    def beats(self, other: Tip) -> bool:
        """Whether this branch is preferred to the other: more accumulated weight, then the lower digest.

        Before the digest comes the revision, because a round to which nobody contributed adds no weight, and must not
        send those who committed it back to where they came from.
        """
        mine, theirs = (self.weight, self.revision), (other.weight, other.revision)
        return (*mine, _inverted(self.digest)) > (*theirs, _inverted(other.digest))


def _inverted(digest: bytes) -> bytes:
    return bytes(255 - byte for byte in digest)


@attrs.frozen
class Link:
    """How one revision was made from the one before it."""

    plan: bytes
    """The plan's id."""
    root: bytes
    """The Merkle root of the new outer state."""
    contributions: tuple[SignedWeight, ...]
    """In the order of the plan's members; none has weight 0."""

    @property
    def weight(self) -> float:
        """What the revision adds to the branch, in tokens."""
        return math.fsum(signed.weight for signed in self.contributions)

    def pack(self) -> bytes:
        """The link in bytes."""
        body = b"".join(_CONTRIBUTION.pack(signed.weight, signed.signature) for signed in self.contributions)
        return _LINK.pack(self.plan, self.root, len(self.contributions)) + body


def unpack_links(data: bytes, max_members: int) -> list[Link]:
    """The links that were packed one after the other.

    Raises:
        ProtocolError: The bytes are none, or a link has more contributors than a round can have.
    """
    links, position = [], 0
    while position < len(data):
        if len(data) - position < _LINK.size:
            raise ProtocolError("a history that ends within a link")
        plan, root, count = _LINK.unpack_from(data, position)
        position += _LINK.size
        size = count * _CONTRIBUTION.size
        if count > max_members or size > len(data) - position:
            raise ProtocolError(f"a history with {count} contributors to one revision")
        contributions = _CONTRIBUTION.iter_unpack(data[position : position + size])
        links.append(Link(plan, root, tuple(SignedWeight(*signed) for signed in contributions)))
        position += size
    return links


@attrs.frozen(kw_only=True, slots=False)  # the cached digest needs a dictionary
class Header:
    """What a digest hashes. `weight` is the sum of all contributions' weights since the run was founded, in tokens."""

    run: bytes
    revision: int
    previous: bytes
    plan: bytes
    contributions: bytes
    """Hash of the contributors' keys and weights, see `hash_contributions`."""
    weight: float
    root: bytes

    @classmethod
    def genesis(cls, run: bytes, root: bytes) -> Header:
        """Of revision 0."""
        zeros = bytes(32)
        return cls(run=run, revision=0, previous=run, plan=zeros, contributions=zeros, weight=0.0, root=root)

    def next(self, link: Link) -> Header:
        """The header that a link leads to."""
        return Header(
            run=self.run,
            revision=self.revision + 1,
            previous=self.digest,
            plan=link.plan,
            contributions=hash_contributions(link.contributions),
            weight=self.weight + link.weight,
            root=link.root,
        )

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 over the fields, each of fixed length."""
        fixed = struct.pack(">Qd", self.revision, self.weight)
        hashes = self.previous + self.plan + self.contributions + self.root
        return hashlib.sha256(DIGEST_DOMAIN + self.run + fixed + hashes).digest()

    @property
    def tip(self) -> Tip:
        """The end of the branch that this header closes."""
        return Tip(self.revision, self.weight, self.digest)


def hash_contributions(contributions: Sequence[SignedWeight]) -> bytes:
    """SHA-256 over the contributors' keys and weights. Signatures are left out: of one statement there can be many."""
    fields = b"".join(signed.public_key + struct.pack(">d", signed.weight) for signed in contributions)
    return hashlib.sha256(CONTRIBUTIONS_DOMAIN + fields).digest()
