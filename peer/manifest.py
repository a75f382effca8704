"""The manifest of a run: its settings as TOML, signed by the founder, and the run id that follows from them.

A manifest travels over the network, so its text is untrusted: it is at most 64 KiB, holds only tables and keys that
`Settings` knows, every value is checked, and the founder's signature over the run id must hold. The run id is a hash of
the settings' meaning, not of the text: comments, order and spelling of numbers do not change it.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import math
import re
import tomllib
import typing
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

import attrs
import msgpack  # type: ignore[import-untyped]
import msgspec

from optim.methods import GRADIENT_RECIPES
from optim.mixers import GatheredMean
from optim.outers import Nesterov
from optim.policies import QuadraticSteps
from peer.algorithm import (
    MAX_INTEGER,
    METHODS,
    PIPELINE,
    AlgorithmSettings,
    check_bounds,
    types_of,
    why_not,
    window_of,
)
from peer.home import HomeError
from peer.schedule import FINAL_LR, Schedule
from peer.settings import Settings
from peer.text import from_base32, printable, to_base32
from protocol.errors import SettingsError, ShoalError
from protocol.identity import PeerId, verify

if TYPE_CHECKING:
    from peer.home import Home
    from protocol.identity import Identity

MAX_MANIFEST: Final = 64 * 1024  # bytes of UTF-8
SIGNATURE_DOMAIN: Final = "manifest"
RUN_ID_DOMAIN: Final = b"shoal-run-v1"
_FOUNDER: Final = "founder"
_NUMBER_LIMIT: Final = 2**63  # what msgpack, and every peer's integers, hold

# One line per key, for the files that people edit. A test keeps it complete.
NOTES: Final[Mapping[str, str]] = {
    "run.name": "what people call this run",
    "run.seed": "where all randomness starts",
    "run.rounds": "outer rounds until the run is over; 0: until everybody leaves",
    "model.family": '"transformer": a decoder over bytes',
    "model.layers": "blocks",
    "model.width": "features per position; a multiple of heads",
    "model.heads": "attention heads; width / heads must be even",
    "model.context": "bytes that the model sees at once",
    "data.source": '"stdlib": Python\'s own source on each machine; "text": what each peer passes as --data',
    "data.shards": "parts the data is cut into; each belongs to one peer at a time",
    "data.validation": "share of the data that nobody trains on",
    "inner.optimizer": "each peer's local optimizer",
    "inner.lr": "peak learning rate",
    "inner.betas": "AdamW's decay rates",
    "inner.weight_decay": "decoupled weight decay",
    "inner.clip": "largest gradient norm",
    "inner.warmup": "inner steps until the peak learning rate",
    "inner.batch": "sequences per inner step",
    "algorithm.name": "how peers' work is combined",
    "algorithm.inner_steps": "local steps between two exchanges of the same parameters",
    "algorithm.outer_lr": "step size of the outer optimizer",
    "algorithm.outer_momentum": "its momentum; use about 0.5 for runs of a few dozen rounds",
    "algorithm.fragments": "parts of the model that take turns in being exchanged; they divide inner_steps",
    "algorithm.delay": "local steps that go on while an exchange is under way",
    "algorithm.strided": "whether fragments take every so-manieth block, or consecutive ones",
    "algorithm.alpha": "streaming: share of the local parameters that stays; else a momentum or a rate",
    "algorithm.beta": "weight of the pair's mean update",
    "algorithm.gamma": "pull towards the pair's mean parameters",
    "algorithm.momentum": "slow momentum",
    "algorithm.clip": "most that an element of the slow momentum may be",
    "algorithm.mu": "pull towards the outer parameters in each local step",
    "algorithm.rho": "how far away local steps look for sharpness",
    "algorithm.rule": "adam, yogi or adagrad",
    "algorithm.beta1": "decay of the outer optimizer's first moment",
    "algorithm.beta2": "decay of its second moment",
    "algorithm.tau": "what is added to the root of the second moment",
    "algorithm.base_steps": "fewest local steps between two rounds",
    "algorithm.k": "values that are sent of each chunk of 64 × 64",
    "algorithm.bits": "bits of each value that is sent",
    "algorithm.decay": "share of what was not sent that is remembered",
    "algorithm.pairing": "random pairs, or those of a one-peer graph: exponential or exponential-ring",
    "algorithm.rank": "columns of the factors that matrices are exchanged as, at most",
    "algorithm.adaptive": "whether rank and local steps follow what the last exchanges needed",
    "algorithm.window": "rounds that this looks back",
    "algorithm.quorum": "peers that have to be ready; too few wait for round.grace seconds at most",
    "algorithm.grace": "seconds that a quorum waits for the others",
    "algorithm.keep": "rounds that a peer may miss in a row without losing what it has done",
    "algorithm.buffer": "contributions after which momentum moves the parameters; best the number of peers",
    "algorithm.spread": "share of the momentum that each contribution moves the parameters by",
    "algorithm.paced": "whether slower peers take fewer local steps",
    "algorithm.radial": "whether the mean keeps the length of what peers bring",
    "algorithm.stages": "parts that the model is cut into, each at other peers",
    "algorithm.microbatches": "of inner.batch sequences, in each step of the run",
    "algorithm.local_steps": "of a stage's servers, between two exchanges; the outer optimizer is for more than 1",
    "algorithm.activations": "how what goes between stages is encoded on the wire: fp32, bf16 or int8",
    "algorithm.corrected": "whether the final mean keeps the variance of each matrix",
    "round.grace": "seconds that the first ready peer waits for the others",
    "round.codec": "how updates are encoded on the wire: fp32, bf16, int8, int4 or e3m0",
    "round.aggregation": "how contributions become one",
    "membership.policy": '"open", "private" (needs the ticket\'s swarm key) or "allow" (only the peers listed)',
    "membership.allow": "peer ids, for the policy allow",
    "limits.peers": "most peers in the run",
    "limits.weight": "most tokens that one contribution may count for",
}

MAX_UNEVEN_ROUNDS: Final = 10_000
SHORT_RUN_MOMENTUM: Final = 0.5  # of the outer optimizer; settles within a handful of rounds


class ManifestError(ShoalError):
    """A manifest is not valid: not TOML, unknown or impossible settings, or a signature that does not hold."""


@attrs.frozen
class Manifest:
    """The signed settings of a run. Build one with `create`, `found` or `parse`; all of them validate.

    Attributes:
        settings: What the run's peers agree on.
        founder: The Ed25519 public key (32 bytes) of the peer that founded the run.
        signature: The founder's signature (64 bytes) over the run id.
    """

    settings: Settings
    founder: bytes
    signature: bytes

    @classmethod
    def create(cls, settings: Settings, identity: Identity) -> Manifest:
        """Checks `settings` and signs them. The same settings and identity always give the same manifest.

        Raises:
            ManifestError: The settings are impossible, or too long for a manifest.
        """
        settings = settings_from(settings.tables())
        signature = identity.sign(SIGNATURE_DOMAIN, _run_id(settings, identity.public_key))
        manifest = cls(settings, identity.public_key, signature)
        _check_size(manifest.dump())
        return manifest

    @classmethod
    def found(cls, text: str, identity: Identity) -> Manifest:
        """The manifest for founding a run from a file's text: signs an unsigned one, accepts one signed by `identity`.

        Raises:
            ManifestError: The text is not a valid manifest, or somebody else has signed it.
        """
        tables = _parse_toml(text)
        if _FOUNDER not in tables:
            return cls.create(settings_from(tables), identity)
        manifest = cls.parse(text)
        if manifest.founder != identity.public_key:
            raise ManifestError(
                f"the manifest is signed by another peer ({manifest.founder_id.short}…)",
                hint="join its run with a ticket, or remove the [founder] table to found a new run",
            )
        return manifest

    @classmethod
    def parse(cls, text: str) -> Manifest:
        """Reads a signed manifest and verifies it.

        Raises:
            ManifestError: Anything about it is wrong; the message is one line and names table, key and value.
        """
        tables = _parse_toml(text)
        founder, signature = _founder_from(tables.pop(_FOUNDER, None))
        manifest = cls(settings_from(tables), founder, signature)
        if not verify(founder, signature, SIGNATURE_DOMAIN, manifest.run_id):
            raise ManifestError(
                "the founder's signature does not match the manifest",
                hint="it was changed after signing; to found a new run from it, remove the [founder] table",
            )
        return manifest

    def dump(self) -> str:
        """The manifest as TOML; `parse` gives an equal manifest back."""
        founder = {"public_key": to_base32(self.founder), "signature": to_base32(self.signature)}
        lines = [f"{key} = {_toml(value)}" for key, value in founder.items()]
        return dump_settings(self.settings, notes=False) + "\n".join([f"\n[{_FOUNDER}]", *lines]) + "\n"

    @property
    def run_id(self) -> bytes:
        """SHA-256 (32 bytes) over the canonical settings and the founder's key."""
        return _run_id(self.settings, self.founder)

    @property
    def founder_id(self) -> PeerId:
        """The founder as a peer."""
        return PeerId.of(self.founder)


def kept_manifest(home: Home, run: bytes | None = None) -> Manifest | None:
    """The manifest of the run that a home belongs to, or None if it has not been in one.

    Args:
        home: The home.
        run: The id of the run that the home is to be used for; None: its own.

    Raises:
        HomeError: It belongs to another run, or its manifest is damaged or cannot be read.
    """
    try:
        with home.manifest.open("rb") as file:
            kept = Manifest.parse(file.read(MAX_MANIFEST + 1).decode("utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise HomeError(f"{home.manifest} cannot be read: {error}", hint="use another --home") from error
    except ManifestError as error:
        raise HomeError(
            f"{home.manifest} is damaged: {error}",
            hint="if you have joined the run, delete this file, and it is fetched anew; if you founded it, restore it",
        ) from error
    if run not in (None, kept.run_id):
        raise HomeError(f"{home.path} takes part in another run", hint="use another --home")
    return kept


def parse_settings(text: str) -> Settings:
    """The settings in a manifest's text, signed or not; a signature that is there must hold.

    Raises:
        ManifestError: The text is not a valid manifest.
    """
    tables = _parse_toml(text)
    return Manifest.parse(text).settings if _FOUNDER in tables else settings_from(tables)


def settings_from(tables: Mapping[str, Any]) -> Settings:
    """Validates nested tables `{"model": {"layers": 4}, …}`; what is left out has its default.

    Raises:
        ManifestError: An unknown table or key, a value of the wrong type or out of bounds, or values that do not fit
            together.
    """
    classes = typing.get_type_hints(Settings)
    _check_known(tables, [*classes, _FOUNDER], "table", "")
    parts: dict[str, Any] = {}
    for name, kind in classes.items():
        table = tables.get(name, {})
        if not isinstance(table, Mapping):
            raise ManifestError(f"{name} must be a table", hint=f"write [{name}] and its keys below")
        parts[name] = _algorithm_from(table) if kind is AlgorithmSettings else _table_from(name, kind, table)
    settings = Settings(**parts)
    _check_together(settings)
    return settings


def warnings(settings: Settings) -> tuple[str, ...]:
    """What is allowed but probably not meant, one line each."""
    found = []
    rounds, recipe = settings.run.rounds, settings.algorithm.recipe()
    plain = recipe.outer == Nesterov(lr=1.0, momentum=0.0)  # a pipeline without local steps
    momentum = None if plain else settings.algorithm.get("outer_momentum")
    # Nesterov's gain lr / (1 - mu) needs several of its memories of 1 / (1 - mu) rounds to settle.
    needed = math.ceil(round(5 / (1 - momentum), 6)) if isinstance(momentum, float) else 0
    if 0 < rounds < needed and isinstance(momentum, float) and momentum > SHORT_RUN_MOMENTUM:
        found.append(
            f"run.rounds = {rounds} is short for algorithm.outer_momentum = {momentum:g}, "
            f"which needs about {needed} rounds; use {SHORT_RUN_MOMENTUM} for short runs"
        )
    steps = Schedule(settings, recipe).before(rounds + 1)
    if rounds and steps <= settings.inner.warmup:
        found.append(
            f"inner.warmup = {settings.inner.warmup} is longer than the whole run "
            f"({steps} inner steps): the learning rate never reaches its peak"
        )
    if settings.data.shards < settings.limits.peers:
        found.append(
            f"data.shards = {settings.data.shards} is less than limits.peers = {settings.limits.peers}: "
            "some peers may get no data"
        )
    return tuple(found)


def dump_settings(settings: Settings, *, notes: bool = True) -> str:
    """Unsigned settings as TOML, with a comment for each key if `notes`."""
    tables = []
    for name, table in settings.tables().items():
        lines = [f"{key} = {_toml(value)}" for key, value in table.items()]
        if notes:
            width = max(map(len, lines))
            lines = [f"{line:{width}}  # {NOTES[f'{name}.{key}']}" for line, key in zip(lines, table, strict=True)]
        tables.append("\n".join([f"[{name}]", *lines]) + "\n")
    return "\n".join(tables)


def _run_id(settings: Settings, founder: bytes) -> bytes:
    tables = {name: sorted(table.items()) for name, table in settings.tables().items()}
    encoded: bytes = msgpack.packb([sorted(tables.items()), founder], use_bin_type=True)
    return hashlib.sha256(RUN_ID_DOMAIN + encoded).digest()


def _check_size(text: str) -> None:
    if len(text.encode("utf-8", "surrogatepass")) > MAX_MANIFEST:
        raise ManifestError(f"the manifest is longer than {MAX_MANIFEST // 1024} KiB")


def _parse_toml(text: str) -> dict[str, Any]:
    _check_size(text)
    try:
        return tomllib.loads(text)
    except RecursionError as error:
        raise ManifestError("the manifest is nested too deeply") from error
    except ValueError as error:  # tomllib's own error, or an integer of thousands of digits
        raise ManifestError(f"the manifest is not TOML: {printable(str(error))}") from error


def _founder_from(table: object) -> tuple[bytes, bytes]:
    if table is None:
        raise ManifestError("the manifest is not signed", hint="`shoal start` signs it when it founds the run")
    if not isinstance(table, Mapping):
        raise ManifestError(f"{_FOUNDER} must be a table")
    sizes = {"public_key": 32, "signature": 64}
    _check_known(table, sizes, "key", f"{_FOUNDER}.")
    values = []
    for key, size in sizes.items():
        try:
            value = from_base32(table[key]) if isinstance(table.get(key), str) else b""
        except ValueError:
            value = b""
        if len(value) != size:
            raise ManifestError(f"{_FOUNDER}.{key} must be {size} bytes in base32")
        values.append(value)
    return values[0], values[1]


def _check_known(names: Iterable[str], known: Iterable[str], what: str, prefix: str) -> None:
    known = list(known)
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(name[:64], known, n=1)
            hint = f"did you mean {prefix}{close[0]}?" if close else "known are " + ", ".join(known)
            raise ManifestError(f"unknown {what} {prefix}{printable(name, 64)}", hint=hint)


def _table_from(name: str, kind: type[Any], table: Mapping[str, Any]) -> object:
    """One table's attrs object, each key checked by itself so that the error can name it."""
    hints = typing.get_type_hints(kind)
    _check_known(table, hints, "key", f"{name}.")
    values = {}
    for key, raw in table.items():
        try:
            values[key] = _value_from(raw, hints[key])
            kind(**{key: values[key]})  # runs the validators of this key; the other keys have their defaults
        except (ValueError, TypeError) as error:
            reason = str(error.args[0]).removeprefix(f"'{key}' ").partition(": ")[0]
            raise ManifestError(f"{name}.{key} = {_shown(raw)}: {reason}") from error
    return kind(**values)


def _algorithm_from(table: Mapping[str, Any]) -> AlgorithmSettings:
    """The method and its constants."""
    name = table.get("name", "diloco")
    if not isinstance(name, str) or name not in (*METHODS, *GRADIENT_RECIPES):
        close = difflib.get_close_matches(name[:64], METHODS, n=1) if isinstance(name, str) else []
        raise ManifestError(
            f"algorithm.name = {_shown(name)}: must be {' or '.join(map(_toml, METHODS))}",
            hint=f'did you mean "{close[0]}"?' if close else None,
        )
    if (reason := why_not(name)) is not None:
        raise ManifestError(f"algorithm.name = {_toml(name)}: cannot be used in a run: {reason}")
    hints = types_of(name)
    _check_known(table, ["name", *hints], "key", "algorithm.")
    values: dict[str, Any] = {}
    for key, raw in table.items():
        if key == "name":
            continue
        try:
            values[key] = _value_from(raw, hints[key])
            check_bounds(key, values[key])
        except ValueError as error:
            raise ManifestError(f"algorithm.{key} = {_shown(raw)}: {error.args[0]}") from error
    if (problem := _problem_of(name, values)) is not None:
        # One constant may be to blame, whatever the others are.
        alone = [found for key in values if (found := _problem_of(name, {key: values[key]})) is not None]
        raise (alone or [problem])[0]
    return AlgorithmSettings(name, **values)


def _problem_of(name: str, constants: Mapping[str, Any]) -> ManifestError | None:
    """Why a method cannot work with these constants, and the defaults of the others; None if it can."""
    given = ", ".join(f"algorithm.{key} = {_toml(value)}" for key, value in constants.items())
    try:
        AlgorithmSettings(name, **constants).recipe()
    except SettingsError as error:
        return ManifestError(f"{given}: {error}", hint=error.hint)
    except (ValueError, TypeError) as error:
        # Parts name what they check in their own way: "'lr' must be > 0: 0.0".
        reason = re.sub(r"^'\w+' (?=must)", "", str(error.args[0])).partition(": ")[0]
        return ManifestError(f"{given}: {reason}")
    return None


def _value_from(raw: object, hint: Any) -> object:  # noqa: ANN401 - a type expression has no type of its own
    """`raw` as `hint` wants it, without loss: integers become floats where floats are wanted, nothing else changes."""
    if typing.get_origin(hint) is typing.Literal and raw not in typing.get_args(hint):
        raise ValueError("must be " + " or ".join(map(_toml, typing.get_args(hint))))
    try:
        value: object = msgspec.convert(raw, hint)
    except msgspec.ValidationError as error:
        raise ValueError(str(error).replace("`", "").replace("Expected", "expected")) from error
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    for number in value if isinstance(value, tuple) else (value,):
        if isinstance(number, float) and not math.isfinite(number):
            raise ValueError("must be a finite number")
        if isinstance(number, int) and not -_NUMBER_LIMIT <= number < _NUMBER_LIMIT:
            raise ValueError("must fit into 64 bits")
    return value + 0.0 if isinstance(value, float) else value  # -0.0 and 0.0 are one setting


def _check_together(settings: Settings) -> None:
    """The rules that span several keys, and those that need more than a bound."""
    run, model, membership = settings.run, settings.model, settings.membership
    recipe = settings.algorithm.recipe()
    if isinstance(recipe.policy, QuadraticSteps):
        _check_uneven(settings, recipe.policy)
    if isinstance(recipe.mixer, GatheredMean) and settings.limits.weight < 1:
        raise ManifestError(f"limits.weight = {settings.limits.weight:g}: must be >= 1 for {settings.algorithm.name}")
    window = window_of(recipe)
    if window is not None and window.grace > settings.round.grace:
        raise ManifestError(
            f"algorithm.grace = {window.grace:g}: must be <= round.grace = {settings.round.grace:g}",
            hint="nobody waits longer than that: it is for how long too few wait for more",
        )
    stages = settings.algorithm["stages"] if settings.algorithm.name == PIPELINE else 1
    if isinstance(stages, int) and stages > model.layers + 2:
        raise ManifestError(
            f"algorithm.stages = {stages}: must be <= {model.layers + 2} for model.layers = {model.layers}",
            hint="each layer, the embedding and the output can be a stage by itself",
        )
    if not run.name.isprintable():
        raise ManifestError(f"run.name = {_toml(printable(run.name))}: must be printable, on one line")
    if model.width % model.heads:
        raise ManifestError(f"model.width = {model.width}: must be a multiple of model.heads = {model.heads}")
    if (model.width // model.heads) % 2:
        raise ManifestError(
            f"model.heads = {model.heads}: gives heads of {model.width // model.heads} features, which must be even",
            hint="rotary position embeddings turn pairs of features",
        )
    if membership.policy == "allow" and not membership.allow:
        raise ManifestError('membership.allow is empty: the policy "allow" lets in only the peers that it lists')
    if membership.policy != "allow" and membership.allow:
        raise ManifestError(f'membership.allow lists peers, but the policy is "{membership.policy}", not "allow"')
    for text in membership.allow:
        try:
            PeerId.parse(text)
        except ValueError as error:
            raise ManifestError(f"membership.allow: {_toml(printable(text, 64))} is not a peer id") from error


def _check_uneven(settings: Settings, policy: QuadraticSteps) -> None:
    """A schedule whose rounds differ in length has to be worked out in advance, and to end."""
    if settings.run.rounds > MAX_UNEVEN_ROUNDS:
        raise ManifestError(
            f"run.rounds = {settings.run.rounds}: must be <= {MAX_UNEVEN_ROUNDS} for {settings.algorithm.name}",
            hint="its rounds differ in length, and the schedule of the whole run is worked out in advance",
        )
    if policy.alpha > FINAL_LR * settings.inner.lr * MAX_INTEGER**0.5:
        raise ManifestError(
            f"algorithm.alpha = {policy.alpha:g}: too large for inner.lr = {settings.inner.lr:g}: "
            f"some rounds would take more than {MAX_INTEGER} steps"
        )


def _shown(value: object) -> str:
    """A value of the file in an error message, shortened; nested values by their kind only."""
    if isinstance(value, (str, bool, int, float)):
        return printable(_toml(value[:100] if isinstance(value, str) else value), 60)
    return "[…]" if isinstance(value, list) else "{…}" if isinstance(value, dict) else str(value)


def _toml(value: object) -> str:
    """A TOML literal. JSON's strings are TOML's too, once DEL is escaped."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, int) and abs(value) >= _NUMBER_LIMIT:
        return hex(value)  # printing thousands of decimal digits is refused by Python
    return repr(value)  # integers; floats, whose repr is exact and is TOML except for a missing ".0" before e
