"""How values look on the wire: exact, half as long, or a quarter or an eighth with one scale per block.

A codec turns fp32 values into bytes and back. The encoding of a vector is the encodings of its blocks, one after the
other, so a chunk that starts at a multiple of `block` is encoded and decoded by itself, and `encoded_size(start)` is
also where it begins. A block with scales is the scale (little-endian, 0 if all is 0), then the codes:

- `fp32`: the values themselves. `bf16`: their upper 16 bits, rounded.
- `int8`: q from -127 to 127, value q·scale; scale = largest magnitude / 127, as fp32 rounded up to 16 significant bits.
- `int4`: q from -7 to 7, two to a byte, the even element in the low half; scale accordingly, with 8 bits, so that the
  upper half of fp32 is enough.
- `e3m0`: 8·sign + m in each half, value ±2^(m-7)·scale, or 0 for m = 0; scale = largest magnitude, as fp32.

The step follows from the largest magnitude and not from a multiple of the standard deviation: nothing is cut off, and
a maximum is the same in whatever order it is taken, which a sum of squares is not. Every other operation acts on single
elements and rounds once, and a product q·scale needs at most 23 bits, so all processors decode the same bits.

There are two ways to round. *To nearest* (in the logarithm for `e3m0`) has the smaller error, and makes a peer's bytes
a function of its values alone: whichever attempt at a round is salvaged, `ErrorFeedback` holds what it left out. That
is right for a sender with error feedback. *Stochastic*, with a seed, is right on average: up with a probability equal
to the distance from the code below. It is for values whose error nobody keeps, such as a sum that the owner of a chunk
encodes again: to nearest, most of a block with one outlier would become 0, in every round. It costs about sqrt(2) times
the root mean square error, and the owner's bytes are what everybody decodes, so only the owner needs the seed. Chance
is a fixed table of 2^16 different numbers in random order, from a place that the seed decides. So over many seeds each
element meets each number equally often, though elements that are 2^16 apart always meet the same one.
"""

from __future__ import annotations

import typing

from protocol.codecs.base import BLOCK, LARGEST, SMALLEST, Codec, CodecName, NotFinite
from protocol.codecs.blockwise import E3M0, Int4, Int8
from protocol.codecs.feedback import ErrorFeedback
from protocol.codecs.plain import BFloat16, Identity

__all__ = [
    "BLOCK",
    "LARGEST",
    "NAMES",
    "SMALLEST",
    "Codec",
    "CodecName",
    "ErrorFeedback",
    "NotFinite",
    "block_of",
    "encoded_size",
    "make_codec",
]

NAMES: tuple[CodecName, ...] = typing.get_args(CodecName)

_CODECS: dict[CodecName, type[Codec]] = {kind.name: kind for kind in (Identity, BFloat16, Int8, Int4, E3M0)}


def block_of(name: CodecName) -> int:
    """See `Codec.block`."""
    return _CODECS[name].block


def encoded_size(name: CodecName, length: int) -> int:
    """See `Codec.encoded_size`."""
    return _CODECS[name].encoded_size(length)


def make_codec(name: CodecName) -> Codec:
    """A codec with scratch memory of its own, 2 to 5 MiB that are touched as far as vectors are long."""
    return _CODECS[name]()
