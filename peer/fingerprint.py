"""What tells whether tensors in a file are as they were written: disks and copies damage them without a word."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch


def fingerprint(tensors: Mapping[str, torch.Tensor]) -> str:
    """SHA-256, in hexadecimal, over the names, types, shapes and bytes of tensors on the CPU."""
    digest = hashlib.sha256()
    for name, values in sorted(tensors.items()):
        digest.update(f"{len(name)} {name} {values.dtype} {list(values.shape)} ".encode())
        digest.update(values.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
