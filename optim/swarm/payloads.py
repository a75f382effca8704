"""Tensors that go between trainers and servers, as bytes."""

from __future__ import annotations

import math
from typing import Literal

import attrs
import numpy as np
import torch

from protocol.codecs import Codec, CodecName, make_codec
from protocol.errors import ProtocolError

Encoding = Literal["fp32", "bf16", "int8", "tokens"]
"""Codecs of `protocol.codecs`, and whole numbers as int32. fp32 is no compression."""

MOST_DIMENSIONS = 8


@attrs.frozen(eq=False)
class Payload:
    """A tensor as bytes. Trainers pass on those of servers as they are, so that values are rounded once."""

    encoding: Encoding
    shape: tuple[int, ...]
    """Samples first."""
    data: bytes

    @property
    def samples(self) -> int:
        """How many samples it has values of."""
        return self.shape[0]


class Packer:
    """Makes payloads and reads them. Holds scratch memory, so it is for one thread at a time."""

    def __init__(self) -> None:
        self._codecs: dict[CodecName, Codec] = {}

    def pack(self, values: torch.Tensor, encoding: Encoding) -> Payload:
        """Encodes values, to nearest.

        Raises:
            NotFinite: A value is infinite or not a number.
        """
        values = values.detach().cpu().contiguous()
        shape = tuple(values.shape)
        if encoding == "tokens":
            return Payload(encoding, shape, values.to(torch.int32).numpy().astype("<i4", copy=False).tobytes())
        codec = self._codec(encoding)
        out = bytearray(codec.encoded_size(values.numel()))
        if out:
            codec.encode(values.to(torch.float32).view(-1), out)
        return Payload(encoding, shape, bytes(out))

    def unpack(self, payload: Payload) -> torch.Tensor:
        """The values: fp32, or int64 if they are tokens.

        Raises:
            ProtocolError: The bytes do not fit the shape, or do not mean finite numbers.
        """
        shape = payload.shape
        if not 1 <= len(shape) <= MOST_DIMENSIONS or min(shape) < 1:
            raise ProtocolError(f"a payload of shape {list(shape)}")
        length = math.prod(shape)
        if payload.encoding == "tokens":
            if len(payload.data) != 4 * length:
                raise ProtocolError(f"{len(payload.data)} bytes for {length} tokens")
            return torch.from_numpy(np.frombuffer(payload.data, "<i4").astype(np.int64)).view(shape)
        codec = self._codec(payload.encoding)
        if len(payload.data) != codec.encoded_size(length):  # before memory is taken for what a stranger states
            raise ProtocolError(f"{len(payload.data)} bytes of {payload.encoding} for {length} values")
        values = torch.empty(length)
        codec.decode(payload.data, values)
        return values.view(shape)

    def _codec(self, name: CodecName) -> Codec:
        if name not in self._codecs:
            self._codecs[name] = make_codec(name)
        return self._codecs[name]
