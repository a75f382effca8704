"""The swarm keys of a private run, and how a dialler shows that it has one. Without IO.

A run's key can be replaced. Until everybody has the new one, both are good: a side that has two of them proves both,
and the other side says which it goes by. So two peers that have a key in common always meet, in one handshake.
"""

from __future__ import annotations

import hmac

KEY_SIZE = 32
PROOF_SIZE = 32
MOST_KEYS = 2

_PROOF = b"shoal-swarm-key-v1"


class Keyring:
    """The swarm keys that are good now: the newest and, for a while after a rotation, the one before it.

    Args:
        key: The newest key, 32 bytes.
        number: How many keys the run has had before it.
        older: The key before it, if that is still good.

    Raises:
        ValueError: A key has another length.
    """

    def __init__(self, key: bytes, number: int = 0, older: bytes | None = None) -> None:
        if {len(each) for each in (key, older) if each is not None} != {KEY_SIZE}:
            raise ValueError(f"a swarm key has {KEY_SIZE} bytes")
        self.newest = key
        self.number = number
        self.older = older

    @property
    def keys(self) -> tuple[bytes, ...]:
        """All keys that are good, at most `MOST_KEYS`, the newest first."""
        return (self.newest,) if self.older is None else (self.newest, self.older)

    def rotate(self, number: int, key: bytes) -> None:
        """Makes `key` the newest one. The one that was it until now stays good.

        Raises:
            ValueError: `number` is not higher than that of the newest key, or the key has another length.
        """
        if number <= self.number or len(key) != KEY_SIZE:
            raise ValueError(f"a key {number} of {len(key)} bytes cannot follow key {self.number}")
        self.newest, self.number, self.older = key, number, self.newest

    def retire(self) -> None:
        """Only the newest key is good from now on."""
        self.older = None


def prove(keys: tuple[bytes, ...], ephemeral: bytes) -> bytes:
    """What only a holder of these keys can say about a handshake's first public key: `PROOF_SIZE` bytes for each."""
    return b"".join(hmac.digest(key, _PROOF + ephemeral, "sha256") for key in keys)


def proved(keys: tuple[bytes, ...], proof: bytes, ephemeral: bytes) -> tuple[bytes | None, int] | None:
    """The first of our keys that the dialler has proved to have, and the place of its proof; None if it has none.

    In a public run there is no key, and nothing to be proved.

    Args:
        keys: Ours, in the order of preference.
        proof: What the dialler says; anything.
        ephemeral: The public key that it is about.
    """
    if not keys:
        return None if proof else (None, 0)
    if len(proof) % PROOF_SIZE or len(proof) > MOST_KEYS * PROOF_SIZE:
        return None
    for key in keys:
        expected = prove((key,), ephemeral)
        for place in range(len(proof) // PROOF_SIZE):
            if hmac.compare_digest(proof[place * PROOF_SIZE : (place + 1) * PROOF_SIZE], expected):
                return key, place
    return None
