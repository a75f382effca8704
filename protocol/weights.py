"""Weights that are signed, so that nobody can say of others that they have contributed. Without input or output.

A member signs, with its identity's key, what its values weigh in one round: of a revision, made from the state with a
digest. It does so when it says that it is ready. The coordinator hands the signatures on in the plan, where every
member checks them, and whoever keeps the history of a state can show them to others.

A signature says nothing about the other members, or the result: it is as good for the next attempt at the round.
"""

from __future__ import annotations

import struct
from typing import Annotated

import attrs
from msgspec import Meta

from protocol.identity import PUBLIC_KEY_SIZE, SIGNATURE_SIZE, Identity, PeerId, verify

DOMAIN = "weight-v1"
SIZE = PUBLIC_KEY_SIZE + SIGNATURE_SIZE

WeightSignature = Annotated[bytes, Meta(min_length=SIZE, max_length=SIZE)]
"""The signer's public key, and its signature."""


@attrs.frozen
class SignedWeight:
    """What one contributor's values weighed in a round."""

    weight: float
    signature: bytes
    """See `WeightSignature`."""

    @property
    def public_key(self) -> bytes:
        """Whose signature it says it is."""
        return self.signature[:PUBLIC_KEY_SIZE]

    @property
    def peer(self) -> PeerId:
        """Whose weight it is then."""
        return PeerId.of(self.public_key)

    def is_valid(self, run: bytes, tag: str, revision: int, base: bytes) -> bool:
        """Whether the holder of the key has signed this weight for this round on this state."""
        fields = _fields(run, tag, revision, base, self.weight)
        return verify(self.public_key, self.signature[PUBLIC_KEY_SIZE:], DOMAIN, *fields)


def sign_weight(identity: Identity, run: bytes, tag: str, revision: int, base: bytes, weight: float) -> SignedWeight:
    """Signs what our values weigh in the round that makes `revision` from the state with the digest `base`."""
    signature = identity.sign(DOMAIN, *_fields(run, tag, revision, base, weight))
    return SignedWeight(weight, identity.public_key + signature)


def _fields(run: bytes, tag: str, revision: int, base: bytes, weight: float) -> tuple[bytes, ...]:
    return run, tag.encode(), struct.pack(">Q", revision), base, struct.pack(">d", weight)
