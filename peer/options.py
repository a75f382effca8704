"""The options that commands share, each declared once, and the decorator that gives them to a command.

A command declares a parameter of one of these classes; `spread` puts the class's fields in its place, as options.
"""

from __future__ import annotations

import functools
import inspect
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, cast, get_type_hints

import attrs
import typer

from protocol.errors import AddressError
from protocol.transport import Address

if TYPE_CHECKING:
    from peer.contact import Contact

ANY_PORT: Final = Address("0.0.0.0", 0)
_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?(?:/s)?", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Bytes in "2M" (2 000 000), "1.5Gi" (1.5 · 2³⁰) or "300000"."""
    match = _SIZE.fullmatch(text.strip())
    number, unit, binary = match.groups() if match else ("", "", "")
    size = (
        int(float(number) * (1024 if binary else 1000) ** ("kmgt".index(unit.lower()) + 1 if unit else 0))
        if number
        else 0
    )
    if size < 1 or (binary and not unit):
        raise typer.BadParameter(f"{text!r} is not a size. Examples: 500k, 2M, 1.5G, 4Gi.")
    return size


def parse_constant(text: str) -> tuple[str, object]:
    """KEY=VALUE; the value as TOML writes it, or else as it is."""
    key, equals, value = (part.strip() for part in text.partition("="))
    if not (key and equals and value):
        raise typer.BadParameter(f"{text!r} is not KEY=VALUE. Example: fragments=4.")
    try:
        return key, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key, value


def parse_address(text: str | Address) -> Address:
    """HOST:PORT as an address; typer prints its error, and passes defaults through here too."""
    if isinstance(text, Address):
        return text
    try:
        return Address.parse(text)
    except AddressError as error:
        raise typer.BadParameter(f"{error}. {error.hint or ''}".strip()) from error


def contact(text: str) -> object:
    """PEERID@HOST:PORT as a contact; typer prints its error."""
    from peer.contact import parse_contact

    try:
        return parse_contact(text)
    except AddressError as error:
        raise typer.BadParameter(f"{error}. {error.hint or ''}".strip()) from error


@attrs.frozen(kw_only=True)
class HomeOptions:
    """Which peer a command is about."""

    home: Annotated[
        Path | None,
        typer.Option(
            envvar="SHOAL_HOME", metavar="DIR", help="Where this peer keeps its identity and state. Default: user data."
        ),
    ] = None
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an unexpected error.")] = False

    @property
    def path(self) -> Path:
        """The home directory that is meant, by default the platform's place for a user's data."""
        if self.home is not None:
            return self.home
        import platformdirs

        return platformdirs.user_data_path("shoal", appauthor=False)


@attrs.frozen(kw_only=True)
class PeerOptions(HomeOptions):
    """How a peer meets others."""

    listen: Annotated[
        Address,
        typer.Option(
            parser=parse_address,
            metavar="HOST:PORT",
            help="Where others connect; port 0: as last time if it is free, else any.",
        ),
    ] = ANY_PORT
    announce: Annotated[
        Address | None,
        typer.Option(parser=parse_address, metavar="HOST:PORT", help="Address to tell others instead, if it differs."),
    ] = None
    relay: Annotated[bool, typer.Option(help="Pass on bytes between peers that cannot reach each other.")] = True
    no_map: Annotated[bool, typer.Option("--no-map", help="Do not ask the router to map a port.")] = False
    bootstrap: Annotated[
        list[object] | None,
        typer.Option(
            parser=contact, metavar="PEERID@HOST:PORT", help="A helper, or a peer, to begin with. May be repeated."
        ),
    ] = None
    events: Annotated[Path | None, typer.Option(metavar="FILE", help="Append events as JSON Lines.")] = None
    max_upload: Annotated[
        int | None, typer.Option(parser=parse_size, metavar="SIZE", help="Bytes per second at most, such as 2M.")
    ] = None
    max_download: Annotated[
        int | None, typer.Option(parser=parse_size, metavar="SIZE", help="Bytes per second at most, such as 2M.")
    ] = None
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress, only errors.")] = False

    @property
    def contacts(self) -> tuple[Contact, ...]:
        """The peers to begin with."""
        return cast("tuple[Contact, ...]", tuple(self.bootstrap or ()))


@attrs.frozen(kw_only=True)
class NodeOptions(PeerOptions):
    """How a peer that trains runs on this machine."""

    data: Annotated[
        str, typer.Option(metavar="PATH", help="What to train on: a text file, a directory, or stdlib.")
    ] = "stdlib"
    ticket_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a ticket for the run, to invite others.")
    ] = None
    max_memory: Annotated[
        int | None, typer.Option(parser=parse_size, metavar="SIZE", help="Memory at most, such as 4G.")
    ] = None
    device: Annotated[str, typer.Option(metavar="DEVICE", help="auto, cpu, cuda, cuda:1, …")] = "auto"
    threads: Annotated[
        int | None,
        typer.Option(min=1, max=1024, help="Processor threads for training. Default: 1 for a small model, else all."),
    ] = None
    serve: Annotated[
        bool, typer.Option(help="Serve a stage, in a run of the algorithm swarm. Else: only lead microbatches.")
    ] = True
    linger: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="Stay so long after the last round, for newcomers.")
    ] = 0.0


def _setting(table: str, key: str, **options: Any) -> Any:  # noqa: ANN401 - attrs types its fields by annotation
    return attrs.field(default=None, metadata={"setting": (table, key), **options})


@attrs.frozen(kw_only=True)
class SettingsOptions:
    """Settings of a new run; what is not given has the manifest's default."""

    name: Annotated[str | None, typer.Option(help="What people call the run.")] = _setting("run", "name")
    seed: Annotated[int | None, typer.Option(help="Where all randomness starts.")] = _setting("run", "seed")
    rounds: Annotated[int | None, typer.Option(help="Outer rounds; 0: until everybody leaves.")] = _setting(
        "run", "rounds"
    )
    layers: Annotated[int | None, typer.Option(help="Blocks of the transformer.")] = _setting("model", "layers")
    width: Annotated[int | None, typer.Option(help="Features per position.")] = _setting("model", "width")
    heads: Annotated[int | None, typer.Option(help="Attention heads.")] = _setting("model", "heads")
    context: Annotated[int | None, typer.Option(help="Bytes that the model sees at once.")] = _setting(
        "model", "context"
    )
    algorithm: Annotated[str | None, typer.Option(help="How work is combined: diloco, noloco, swarm (stages), …")] = (
        _setting("algorithm", "name")
    )
    inner_steps: Annotated[int | None, typer.Option(help="Local steps between two rounds.")] = _setting(
        "algorithm", "inner_steps"
    )
    outer_lr: Annotated[float | None, typer.Option(help="Step size of the outer optimizer.")] = _setting(
        "algorithm", "outer_lr"
    )
    outer_momentum: Annotated[float | None, typer.Option(help="Its momentum.")] = _setting(
        "algorithm", "outer_momentum"
    )
    constant: Annotated[
        list[object] | None,
        typer.Option(
            parser=parse_constant, metavar="KEY=VALUE", help="Another constant of the algorithm. May be repeated."
        ),
    ] = None
    lr: Annotated[float | None, typer.Option(help="Learning rate of the local optimizer.")] = _setting("inner", "lr")
    batch: Annotated[int | None, typer.Option(help="Sequences per local step.")] = _setting("inner", "batch")
    grace: Annotated[float | None, typer.Option(help="Seconds that the first ready peer waits.")] = _setting(
        "round", "grace"
    )
    private: Annotated[bool, typer.Option("--private", help="Only for holders of a ticket.")] = False

    def tables(self) -> dict[str, dict[str, object]]:
        """What was given, as tables of a manifest.

        Raises:
            typer.BadParameter: What was given does not fit together.
        """
        if self.algorithm == "swarm" and self.inner_steps is not None:
            raise typer.BadParameter(
                f"--inner-steps is not for swarm. For local steps of stages: --constant local_steps={self.inner_steps}."
            )
        tables: dict[str, dict[str, object]] = {"membership": {"policy": "private"}} if self.private else {}
        for field in attrs.fields(type(self)):
            value = getattr(self, field.name)
            if "setting" in field.metadata and value is not None:
                table, key = field.metadata["setting"]
                tables.setdefault(table, {})[key] = value
        constants = cast("list[tuple[str, object]]", self.constant or [])
        return tables | ({"algorithm": tables.get("algorithm", {}) | dict(constants)} if constants else {})


def spread(command: Callable[..., None]) -> Callable[..., None]:
    """Replaces parameters whose class is declared here by one option for each of the class's fields."""
    groups: dict[str, type] = {}
    parameters: list[inspect.Parameter] = []
    hints = get_type_hints(command, include_extras=True)
    for name, parameter in inspect.signature(command).parameters.items():
        if attrs.has(hints[name]) and hints[name].__module__ == __name__:
            groups[name] = hints[name]
            parameters += _options(hints[name])
        else:
            parameters.append(parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY))

    @functools.wraps(command)
    def wrapper(**values: object) -> None:
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in attrs.fields(group)})
        command(**values)

    # typer looks at both.
    wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return wrapper


def _options(group: type) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=hints[field.name]
        )
        for field in attrs.fields(group)
    ]
