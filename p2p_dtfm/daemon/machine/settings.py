"""What a daemon was told. Defaults come first, then the configuration file, the environment and the
flags, each over the one before."""

import difflib
import os
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from pydantic_core import ErrorDetails

from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.core.protocol.model_spec import takes_numbers
from p2p_dtfm.core.protocol.names import fault_of_name
from p2p_dtfm.core.protocol.plain_words import in_plain_words
from p2p_dtfm.daemon.machine.home import default_home, expanded
from p2p_dtfm.daemon.machine.hours import HOURS_PATTERN, Hours
from p2p_dtfm.ports.granted import granted_processors

PREFIX = "P2P_DTFM_"
LEAST_DISK_GIB = 0.01
LEAST_RATE_MBPS = 0.01
MBIT_BYTES = 125_000
_PATTERNS = {
    "hours": 'must be two times of day, as in "22-07"',
    "run_digest": "must be a digest: 64 of the characters 0-9 and a-f",
}
_ALTERNATIVES = {"dashboard": 'must be a port from 1 to 65535, "auto" or "off"'}


def _name(text: str) -> str:
    """A name, which strangers see on their screens; empty: none is given."""
    fault = fault_of_name(text) if text else ""
    if fault or not text.isprintable():
        raise ValueError(fault or "must be of characters that can be seen")
    return text


def _path(value: object) -> object:
    """A path, which may not be empty. An empty one would be the current directory, and an unset
    variable would fill that with a home. No path has a zero byte, which a file of settings may."""
    if value == "" or "\0" in str(value):
        raise ValueError("must be the path of a directory")
    return value


def _own(path: Path | None) -> Path | None:
    """The path with `~` expanded. Raises `UserError`, which says more than where the path
    stands."""
    return None if path is None else expanded(path)


def _webhook(text: str) -> str:
    parts = urlsplit(text)
    if text and (parts.scheme not in ("http", "https") or not parts.hostname):
        raise ValueError('must be an address such as "https://example.org/hook"')
    return text


def _disk(gib: float) -> float:
    """A limit of the disk. A user that asks for less has mistaken the unit: nothing that was
    prepared would stay."""
    if 0 < gib < LEAST_DISK_GIB:
        raise ValueError(f"must be 0, or {LEAST_DISK_GIB} at least")
    return gib


def _rate(mbps: float) -> float:
    """A limit of the line. Nobody can take part with less: signs of life alone would fill the
    line."""
    if 0 < mbps < LEAST_RATE_MBPS:
        raise ValueError(f"must be 0, or {LEAST_RATE_MBPS} at least")
    return mbps


class Settings(BaseModel):
    """Every setting of the daemon. A file has the same names, the environment has them in upper
    case."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    home: Annotated[Path, BeforeValidator(_path), AfterValidator(_own)] = Field(
        default_factory=default_home, description="identity, data, checkpoints"
    )
    name: Annotated[str, AfterValidator(_name)] = Field(
        default="",
        description="what others see this peer called, 24 characters at most; empty: two words "
        'that its identity makes, such as "brave-otter"',
    )
    run: str = Field(
        default="",
        description="run spec to found a swarm with; without it and initial_peers, the home's last "
        "run is taken up",
    )
    new: bool = Field(
        default=False, description="found afresh, whatever this home or others have of the run"
    )
    apart: bool = Field(
        default=False,
        description="go on from what this home has, though members of another version are there",
    )
    nearby: bool = Field(
        default=True, description="look for members that were met before on the local network"
    )
    initial_peers: tuple[str, ...] = Field(default=(), description="addresses of a swarm to join")
    invite: str = Field(default="", description="join with this line, which a member has given")
    run_digest: str = Field(
        default="", pattern="^[0-9a-f]{0,64}$", description="join only the run of this digest"
    )
    listen: tuple[str, ...] = Field(
        default=("/ip4/0.0.0.0/tcp/0",), description="addresses to listen on"
    )
    announce: tuple[str, ...] = Field(default=(), description="addresses to tell others")
    relay: bool = Field(
        default=True, description="pass bytes on between peers behind routers, if others can call"
    )
    publish: bool = Field(
        default=True,
        description="publish this peer's device, links and layers in the directory, where anybody "
        "can read them; members know them without it",
    )
    direct_lines: bool = Field(
        default=True,
        description="exchange tensors over connections beside libp2p's, with members that can be "
        "called: they are taken at the port above the one that is listened on, or any",
    )
    port_mapping: bool = Field(
        default=True,
        description="let libp2p ask the router to forward the port that is listened on",
    )
    device: str = Field(
        default="auto",
        description='"auto", "cpu", "cuda" or "cuda:N"; "all" or a list with commas: a daemon for '
        "each device",
    )
    network: Literal["auto", "lan", "wan"] = Field(
        default="auto",
        description="how soon silence is a fault: for machines side by side, or around the world; "
        "auto: wan, unless only loopback is listened on",
    )
    shape: Path | None = Field(
        default=None, description="shaped links: the file that a scenario's launcher wrote"
    )
    threads: int = Field(default=0, ge=0, le=1024, description="CPU threads; 0: half of the cores")
    memory_gib: float = Field(
        default=0.0,
        ge=0,
        le=1e6,
        description="memory to use, in GiB; 0: nearly all that is free, of a card's four fifths",
    )
    resident_gib: float = Field(
        default=0.0,
        ge=0,
        le=1e6,
        description="most memory of the whole process and p2pd, on the processor; 0: no limit",
    )
    uplink_mbps: Annotated[float, AfterValidator(_rate)] = Field(
        default=0.0, ge=0, le=1e6, description="most to send, in Mbit/s; 0: no limit"
    )
    downlink_mbps: Annotated[float, AfterValidator(_rate)] = Field(
        default=0.0, ge=0, le=1e6, description="most to receive, in Mbit/s; 0: no limit"
    )
    disk_gib: Annotated[float, AfterValidator(_disk)] = Field(
        default=0.0,
        ge=0,
        le=1e9,
        description="most disk for checkpoints and data, in GiB; 0: no limit",
    )
    hours: str = Field(
        default="",
        pattern=HOURS_PATTERN,
        description='local time from-until, such as "22-07" or "21:30-06:15"; empty: always',
    )
    on_battery: bool = Field(
        default=False, description="take part while this computer runs on battery, too"
    )
    on_metered: bool = Field(
        default=False, description="take part over a line that the system calls metered, too"
    )
    busy_percent: int = Field(
        default=0,
        ge=0,
        le=100,
        description="pause while other programs use more than this share of the processors, or of "
        "an NVIDIA device, in percent; 0: never",
    )
    webhook: Annotated[str, AfterValidator(_webhook)] = Field(
        default="",
        description="an http or https address that is told of a problem that lasts and of the end",
    )
    notify: bool = Field(
        default=True, description="desktop notifications of the same, where there is a desktop"
    )
    expect_peers: int = Field(
        default=1, ge=1, le=1024, description="a founder waits for this many before the first view"
    )
    expect_wait_s: float = Field(
        default=60.0, ge=0, le=1e9, description="how long it waits for them, in seconds"
    )
    exit_when_done: bool = Field(default=False, description="end when the run is complete")
    until_stdin_closes: bool = Field(
        default=False, description="leave when standard input closes, as when a parent dies"
    )
    dashboard: Literal["auto", "off"] | Annotated[int, Field(ge=1, le=65535)] = Field(
        default="auto", description='port on loopback, "auto" for a free one, or "off"'
    )
    public_status: int = Field(
        default=0,
        ge=0,
        le=65535,
        description="port of a page that anybody may read: loss, speed and how many take part, no "
        "names or addresses; 0: no such page",
    )
    tell_status: bool = Field(
        default=False,
        description="tell bootstrap nodes that ask what such a page shows, so that they can serve "
        "it; with public_status it is told as well",
    )
    tensorboard: Annotated[Path | None, BeforeValidator(_path), AfterValidator(_own)] = Field(
        default=None, description="directory for TensorBoard's event files; none without it"
    )
    samples: bool = Field(
        default=True,
        description="have the model write a little text at each held-out evaluation, in at most a "
        "hundredth of the time",
    )
    transcript_mib: int = Field(
        default=64,
        ge=0,
        le=65536,
        description="most MiB of a run's transcript, which p2p-dtfm verify reads; 0: none",
    )
    ids: bool = Field(
        default=False, description="peers in the human log by their ids, not their names"
    )
    log: Literal["auto", "human", "json"] = Field(default="auto", description="log format")

    @field_validator("*", mode="before")
    @classmethod
    def _true_is_no_number(cls, value: object, info: ValidationInfo) -> object:
        """Refuse true and false where a number is due. Python takes them for 1 and 0: a page would
        listen on port 1, and a daemon would have one thread."""
        kind = cls.model_fields[info.field_name or ""].annotation
        if isinstance(value, bool) and takes_numbers(kind):
            raise ValueError("must be a whole number" if kind is int else "must be a number")
        return value

    @property
    def compute_threads(self) -> int:
        """CPU threads to compute with: as set, or half of the cores that this process may use."""
        return self.threads or max(1, int(granted_processors() / 2))

    @property
    def memory_limit_bytes(self) -> int | None:
        """The memory for the plan; None: what is free."""
        return int(self.memory_gib * (1 << 30)) or None

    @property
    def uplink_bytes_per_s(self) -> int:
        """0: no limit."""
        return int(self.uplink_mbps * MBIT_BYTES)

    @property
    def downlink_bytes_per_s(self) -> int:
        """0: no limit."""
        return int(self.downlink_mbps * MBIT_BYTES)

    @property
    def is_near(self) -> bool:
        """Whether all other peers are on this machine or on one network with it."""
        if self.network == "auto":
            return all(address.startswith(LOOPBACK) for address in self.listen)
        return self.network == "lan"

    @property
    def founds(self) -> bool:
        """Whether to bring a run along. With initial peers, it is founded in their directory."""
        return bool(self.run)


LOOPBACK = ("/ip4/127.", "/ip6/::1/")


@dataclass(frozen=True)
class Resolved:
    """Settings, and where each value came from."""

    settings: Settings
    origins: dict[str, str]

    def describe(self) -> str:
        """One line for each setting, as `--show-config` prints it."""
        values = self.settings.model_dump(mode="json")
        width = max(len(name) for name in values)
        return "\n".join(
            f"{name:<{width}} = {value!r}{_meaning(name, value)}  ({self.origins[name]})"
            for name, value in values.items()
        )


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


def _meaning(name: str, value: object) -> str:
    """What a 0 stands for, where the setting's description says so; else empty."""
    _, zero, meaning = (Settings.model_fields[name].description or "").partition("; 0: ")
    return f", which is {meaning}" if zero and value == 0 and value is not False else ""


def given_zeros(settings: Settings) -> list[str]:
    """What each 0 that somebody has set stands for, and hours that leave none out. The user who
    typed them may mean no value at all."""
    given = ((name, getattr(settings, name)) for name in sorted(settings.model_fields_set))
    meanings = ((name, _meaning(name, value)) for name, value in given)
    told = [f"{name} is 0{meaning}" for name, meaning in meanings if meaning]
    if settings.hours and Hours.parse(settings.hours) is None:
        told.append(f"hours is {settings.hours}, which is the whole day")
    return told


def resolve(config: Path | None, flags: dict[str, Any]) -> Resolved:
    """Merge all sources. Raises `UserError` naming the source, the key and the fix."""
    values: dict[str, Any] = {}
    origins = dict.fromkeys(Settings.model_fields, "default")
    sources = [
        *_from_file(config),
        ("environment", _from_environment()),
        ("flag", {name: value for name, value in flags.items() if value not in (None, ())}),
    ]
    for origin, source in sources:
        _refuse_unknown(source, origin)
        for name, value in source.items():
            values[name] = value
            origins[name] = f"{PREFIX}{name.upper()}" if origin == "environment" else origin
    try:
        return Resolved(Settings.model_validate(values), origins)
    except ValidationError as error:
        found = {str(item["loc"][0]): item for item in reversed(error.errors())}
        name, *others = sorted(found)
        more = "".join(
            f"; {other} ({origins[other]}): {_plain_cause(found[other])}, not "
            f"{_shown(values[other])}"
            for other in others
        )
        raise UserError(
            f"{name} ({origins[name]}): {_plain_cause(found[name])}, not {_shown(values[name])}"
            + more,
            tuple(f"{name}: {Settings.model_fields[name].description}" for name in sorted(found)),
        ) from error


def _from_file(config: Path | None) -> list[tuple[str, dict[str, Any]]]:
    if config is None:
        return []
    try:
        text = config.read_text(encoding="utf-8-sig")  # some editors put a mark in front
        return [(str(config), tomllib.loads(text))]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {config}: {error}", "give the path of a TOML file") from error
    except (ValueError, RecursionError) as error:  # tomllib raises more than it declares
        raise UserError(f"{config} is not valid TOML: {error}", "mend that line") from error


def _from_environment() -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, text in os.environ.items():
        if name.startswith(PREFIX):
            key = name.removeprefix(PREFIX).lower()
            field = Settings.model_fields.get(key)
            is_list = field is not None and field.annotation == tuple[str, ...]
            values[key] = tuple(text.split()) if is_list else text
    return values


def _refuse_unknown(source: dict[str, Any], origin: str) -> None:
    for name in source:
        if name not in Settings.model_fields:
            near = difflib.get_close_matches(name, Settings.model_fields, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else "p2p-dtfm --show-config lists them all"
            raise UserError(f"unknown setting {name!r} ({origin})", hint)


def _plain_cause(error: ErrorDetails) -> str:
    """What is wrong with a setting's value, without the words of the library that found it."""
    name, kind = str(error["loc"][0]), error["type"]
    if name in _ALTERNATIVES:
        return _ALTERNATIVES[name]
    if kind == "string_pattern_mismatch":
        return _PATTERNS.get(name, "must be written otherwise")
    return in_plain_words(error)
