"""The settings of a run: what its manifest says, as validated, immutable classes.

Each class is one table of the manifest. Defaults are meant for a small model on small machines.
"""

from __future__ import annotations

from typing import Any, Literal

import attrs
from attrs.validators import ge, gt, in_, le, lt, max_len, min_len

from peer.algorithm import AlgorithmSettings as AlgorithmSettings
from protocol.codecs import NAMES, CodecName


@attrs.frozen(kw_only=True)
class RunSettings:
    """`[run]`: what the job is called, where its randomness starts, and when it ends."""

    name: str = attrs.field(default="shoal", validator=[min_len(1), max_len(64)])
    seed: int = attrs.field(default=0, validator=[ge(0), lt(2**63)])
    rounds: int = attrs.field(default=0, validator=[ge(0), lt(2**31)])  # 0: until everybody leaves


@attrs.frozen(kw_only=True)
class ModelSettings:
    """`[model]`: a built-in model family and its sizes."""

    family: Literal["transformer"] = attrs.field(default="transformer", validator=in_(["transformer"]))
    layers: int = attrs.field(default=4, validator=[ge(1), le(512)])
    width: int = attrs.field(default=128, validator=[ge(8), le(65536)])
    heads: int = attrs.field(default=4, validator=[ge(1), le(1024)])
    context: int = attrs.field(default=128, validator=[ge(2), le(1 << 20)])


@attrs.frozen(kw_only=True)
class DataSettings:
    """`[data]`: what is trained on. `stdlib` is the source of the Python standard library of each peer's machine."""

    source: Literal["stdlib", "text"] = attrs.field(default="stdlib", validator=in_(["stdlib", "text"]))
    shards: int = attrs.field(default=256, validator=[ge(1), le(65536)])
    validation: float = attrs.field(default=0.05, validator=[gt(0), lt(0.5)])


@attrs.frozen(kw_only=True)
class InnerSettings:
    """`[inner]`: the local optimizer (AdamW) and its schedule, counted in inner steps of the run."""

    optimizer: Literal["adamw"] = attrs.field(default="adamw", validator=in_(["adamw"]))
    lr: float = attrs.field(default=4e-3, validator=[gt(0), le(10)])
    betas: tuple[float, float] = attrs.field(default=(0.9, 0.95))
    weight_decay: float = attrs.field(default=0.1, validator=[ge(0), le(10)])
    clip: float = attrs.field(default=1.0, validator=[gt(0)])
    warmup: int = attrs.field(default=20, validator=[ge(0)])
    batch: int = attrs.field(default=16, validator=[ge(1), le(1 << 20)])  # sequences per step

    @betas.validator
    def _check_betas(self, attribute: object, value: tuple[float, float]) -> None:
        if len(value) != 2 or not all(0 <= beta < 1 for beta in value):
            raise ValueError("betas are two numbers in [0, 1)")


@attrs.frozen(kw_only=True)
class RoundSettings:
    """`[round]`: how outer rounds are closed. `grace`: seconds the first ready peer waits for the rest."""

    grace: float = attrs.field(default=10.0, validator=[gt(0), le(86400)])
    codec: CodecName = attrs.field(default="fp32", validator=in_(NAMES))
    aggregation: Literal["mean"] = attrs.field(default="mean", validator=in_(["mean"]))


@attrs.frozen(kw_only=True)
class MembershipSettings:
    """`[membership]`: who may take part; `allow` lists peer ids."""

    policy: Literal["open", "private", "allow"] = attrs.field(
        default="open", validator=in_(["open", "private", "allow"])
    )
    allow: tuple[str, ...] = attrs.field(default=(), validator=max_len(4096))


@attrs.frozen(kw_only=True)
class LimitSettings:
    """`[limits]`: bounds that every peer enforces on every other."""

    peers: int = attrs.field(default=64, validator=[ge(1), le(4096)])
    weight: float = attrs.field(default=1e9, validator=[gt(0)])  # most that one contribution may weigh, in tokens


@attrs.frozen(kw_only=True)
class Settings:
    """All that a run's peers must agree on."""

    run: RunSettings = attrs.field(factory=RunSettings)
    model: ModelSettings = attrs.field(factory=ModelSettings)
    data: DataSettings = attrs.field(factory=DataSettings)
    inner: InnerSettings = attrs.field(factory=InnerSettings)
    algorithm: AlgorithmSettings = attrs.field(factory=AlgorithmSettings)
    round: RoundSettings = attrs.field(factory=RoundSettings)
    membership: MembershipSettings = attrs.field(factory=MembershipSettings)
    limits: LimitSettings = attrs.field(factory=LimitSettings)

    def tables(self) -> dict[str, dict[str, Any]]:
        """The tables of the manifest, with every key."""
        return {**attrs.asdict(self), "algorithm": self.algorithm.table()}
