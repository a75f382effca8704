"""Bytes and foreign text as people see them: base32 without padding, and strings that are safe on a terminal."""

from __future__ import annotations

import base64
import binascii


def to_base32(data: bytes) -> str:
    """`data` in RFC 4648 base32, lower case, without padding."""
    return base64.b32encode(data).decode("ascii").rstrip("=").lower()


def from_base32(text: str) -> bytes:
    """The inverse of `to_base32`, in upper or lower case.

    Raises:
        ValueError: `text` is not base32, or is not what `to_base32` writes (padding, stray trailing bits).
    """
    try:
        data = base64.b32decode(text.upper() + "=" * (-len(text) % 8))
    except (binascii.Error, ValueError) as error:
        raise ValueError("not base32") from error
    if to_base32(data) != text.lower():
        raise ValueError("not canonical base32")
    return data


def printable(text: str, limit: int = 200) -> str:
    """`text` from a stranger as one line: no control characters, escape sequences or direction marks, and not long."""
    clean = "".join(character if character.isprintable() else "?" for character in text[:limit])
    return clean + "…" if len(text) > limit else clean


def duration(seconds: float) -> str:
    """A length of time for people: 2 h 05 min."""
    minutes, rest = divmod(max(0, int(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02} min"
    return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"
