"""What a scenario file may say: its tables and keys, and errors that name the line and the fix."""

import difflib
import re
import tomllib
from collections.abc import Iterator
from typing import Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.core.protocol.model_spec import true_is_no_number
from p2p_dtfm.core.protocol.plain_words import in_plain_words

NAME_PATTERN = "^[a-z0-9][a-z0-9-]{0,62}$"
LARGEST_SCENARIO = 4096
"""The most peers in one scenario."""


_STRICT = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, populate_by_name=True)
_HEADER = re.compile(r"\s*\[+\s*([\w-]+)\s*\]+")
_NUMBERS = model_validator(mode="before")(cast(Any, classmethod(true_is_no_number)))


class Resources(BaseModel):
    """What a peer has. Each may be stated for a group and overridden for one peer."""

    model_config = _STRICT
    _numbers = _NUMBERS
    forward_tflops: float | None = Field(default=None, ge=1e-6, le=1e6)
    """Sustained in a forward pass."""
    memory_gb: float | None = Field(default=None, gt=0, le=1e6)
    uplink_mbps: float | None = Field(default=None, ge=1e-3, le=1e9)
    """Shared by everything that the peer sends; not limited where absent."""
    downlink_mbps: float | None = Field(default=None, ge=1e-3, le=1e9)
    link_cap_mbps: float | None = Field(default=None, ge=1e-3, le=1e9)
    """No single link from or to the peer is faster. Links do not share it."""
    price_per_hour: float | None = Field(default=None, ge=0, le=1e6)
    """In dollars, for each peer."""


class GroupTable(Resources):
    """Peers that are alike, named `NAME-1`, `NAME-2` ..."""

    name: str = Field(pattern=NAME_PATTERN)
    count: int = Field(ge=1, le=LARGEST_SCENARIO)
    measured: bool = False
    """Whether the peers have this machine's own speed instead of `forward_tflops`."""

    @model_validator(mode="after")
    def _one_speed(self) -> "GroupTable":
        if self.measured == (self.forward_tflops is not None):
            raise ValueError("a group needs either forward_tflops or measured = true")
        return self


class PeerTable(Resources):
    """What differs for one peer of a group."""

    name: str = Field(pattern=NAME_PATTERN)


class LinkTable(BaseModel):
    """The way between two groups or peers. `*` stands for all of them."""

    model_config = _STRICT
    _numbers = _NUMBERS
    origin: str = Field(alias="from", pattern=r"^(\*|[a-z0-9][a-z0-9-]{0,62})$")
    to: str = Field(pattern=r"^(\*|[a-z0-9][a-z0-9-]{0,62})$")
    both: bool = False
    latency_ms: float = Field(ge=0, le=600_000)
    """One way."""
    bandwidth_mbps: float = Field(ge=1e-3, le=1e9)


class FaultTable(BaseModel):
    """Something that happens at the start of a step."""

    model_config = _STRICT
    _numbers = _NUMBERS
    at_step: int = Field(ge=0)
    kind: Literal[
        "kill", "pause", "slow", "cut", "degrade", "corrupt", "join", "leave", "disk full"
    ]
    peer: str
    other: str = ""
    """The far end, for `cut` and `corrupt`; empty for all links of the peer."""
    factor: float = Field(default=1.0, gt=0, le=1e6)
    """How many times slower, for `slow` and `degrade`."""
    steps: int = Field(default=0, ge=0)
    """How many steps the fault lasts. If this is 0 and `seconds` is too, it lasts for good."""
    seconds: float = Field(default=0, ge=0, le=86_400)


class WorkloadTable(BaseModel):
    """How the work of these peers differs from what the run spec alone would say."""

    model_config = _STRICT
    head: bool = True
    """Whether the last layer is a language-model head. The paper's runs had none to speak of."""


class ScenarioFile(BaseModel):
    """A whole scenario file."""

    model_config = _STRICT
    name: str = Field(pattern=NAME_PATTERN)
    description: str = ""
    group: tuple[GroupTable, ...] = Field(min_length=1)
    peer: tuple[PeerTable, ...] = ()
    link: tuple[LinkTable, ...] = ()
    fault: tuple[FaultTable, ...] = ()
    workload: WorkloadTable = WorkloadTable()


class WrongTables(UserError):
    """Tables with mistakes. `rest` is the file with None in place of each wrong table, so that what
    crosses tables can be checked as well. It is None if the groups themselves are wrong."""

    def __init__(self, told: list[tuple[str, str]], rest: ScenarioFile | None) -> None:
        self.told = told
        self.rest = rest
        super().__init__(
            "\n".join(cause for cause, _ in told), tuple(dict.fromkeys(fix for _, fix in told))
        )


def parse_scenario_file(text: str, origin: str) -> ScenarioFile:
    """Validate the text of a scenario file. Raises `UserError` with the line of every mistake in a
    table; see `WrongTables`."""
    try:
        values = tomllib.loads(text)
    except ValueError as error:  # not only what tomllib declares
        line = re.search(r"line (\d+)", str(error))
        where = f"{origin}:{line.group(1)}" if line else origin
        raise UserError(
            f"{where}: not valid TOML: {error}",
            "write it as the examples in configs/scenarios/ are written; "
            "names and other text stand in double quotes",
        ) from error
    except RecursionError as error:
        raise UserError(
            f"{origin}: not valid TOML: nested too deeply", "keep to tables and plain values"
        ) from error
    try:
        return ScenarioFile.model_validate(values)
    except ValidationError as error:
        told = [_explain(item, values, text, origin) for item in _first_causes(error)]
        raise WrongTables(told, _rest(values, error)) from error


def _rest(values: dict[str, Any], error: ValidationError) -> ScenarioFile | None:
    """The file with None for each wrong peer, link or fault; None if anything else is wrong."""
    models: dict[str, type[BaseModel]] = {"peer": PeerTable, "link": LinkTable, "fault": FaultTable}
    wrong = {item["loc"][:2] for item in error.errors()}
    if not all(len(path) == 2 and path[0] in models for path in wrong):
        return None
    tables: dict[str, Any] = {
        name: tuple(
            None if (name, number) in wrong else model.model_validate(table)
            for number, table in enumerate(values.get(name, ()))
        )
        for name, model in models.items()
    }
    groups = tuple(GroupTable.model_validate(table) for table in values["group"])
    return ScenarioFile.model_construct(name=values["name"], group=groups, **tables)


def _first_causes(error: ValidationError) -> list[Any]:
    """The errors without "too few tables" where tables are missing only because they have
    mistakes."""
    items = error.errors()
    broken = {item["loc"][0] for item in items if len(item["loc"]) > 1}
    return [item for item in items if len(item["loc"]) > 1 or item["loc"][0] not in broken]


def line_of(text: str, path: tuple[str | int, ...]) -> int | None:
    """Line (from 1) of a key such as ("group", 1, "count") in TOML text, or of its table."""
    key = path[-1] if path and isinstance(path[-1], str) else ""
    headers = []
    for number, line, is_header in _lines_of_table(text, path):
        if is_header:
            headers.append(number)
        elif key and re.search(rf"(^|[;{{,\s])\"?{re.escape(key)}\"?\s*=", line):
            return number
    return headers[0] if headers else None


def _lines_of_table(text: str, path: tuple[str | int, ...]) -> Iterator[tuple[int, str, bool]]:
    """(number, line, whether it is a header) of the table in which `path` is. For a path of one
    name, also of what stands before any table."""
    table = path[0] if path else ""
    wanted = path[1] if len(path) > 1 and isinstance(path[1], int) else None
    seen, inside = -1, len(path) == 1
    for number, line in enumerate(text.splitlines(), 1):
        header = _HEADER.match(line)
        if header:
            inside = header.group(1) == table
            seen += inside
            inside = inside and wanted in (None, seen)
        if inside:
            yield number, line, header is not None


def _explain(item: Any, values: dict[str, Any], text: str, origin: str) -> tuple[str, str]:
    """(cause, fix) of one validation error."""
    path = tuple(item["loc"])
    line = line_of(text, path)
    where = f"{origin}:{line}" if line else origin
    key = ".".join(str(part + 1) if isinstance(part, int) else part for part in path)
    if item["type"] == "extra_forbidden":
        known = _known_keys(path)
        near = difflib.get_close_matches(str(path[-1]), known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(known)}."
        return f"{where}: unknown key {key!r}", f"{hint} Otherwise remove {str(path[-1])!r}."
    if item["type"] == "missing" and key == "group":
        return (
            f"{where}: there is no [[group]], so there are no peers",
            "write a [[group]] with name, count and forward_tflops, also for a single peer; a "
            "[[peer]] says what is different about one of a group",
        )
    if item["type"] == "missing":
        return f"{where}: {key!r} is missing", f"add {str(path[-1])!r} there"
    if item["type"] in ("tuple_type", "model_type"):
        if item["type"] == "tuple_type":
            return (
                f"{where}: {key!r} is one table or a value, where a list of tables is due",
                f"write [[{key}]], with two brackets, above each of them",
            )
        return (
            f"{where}: {key!r} is a value, where a table is due",
            f"write {'[workload]' if key == 'workload' else f'[[{path[0]}]]'} on a line of its "
            "own, and its keys on those below",
        )
    message = in_plain_words(item)
    found = _lookup(values, path)
    if isinstance(found, dict | list):
        return f"{where}: {key}: {message}", f"change the keys of {key} accordingly"
    return f"{where}: {key}: {message}", f"change {key} (now {found!r})"


def _known_keys(path: tuple[str | int, ...]) -> list[str]:
    tables: dict[str, type[BaseModel]] = {
        "group": GroupTable,
        "peer": PeerTable,
        "link": LinkTable,
        "fault": FaultTable,
        "workload": WorkloadTable,
    }
    table = tables[str(path[0])] if len(path) > 1 else ScenarioFile
    return sorted(field.alias or name for name, field in table.model_fields.items())


def _lookup(values: Any, path: tuple[str | int, ...]) -> Any:
    for part in path:
        try:
            values = values[part]
        except (KeyError, IndexError, TypeError):
            return None
    return values
