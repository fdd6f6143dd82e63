"""Rows that somebody else has measured: their seconds, and the simulator's beside them."""

import shlex
import tomllib
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.core.protocol.plain_words import in_plain_words
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.sim.reproduction.bars import Chart, ChartBar, FigureKind
from p2p_dtfm.sim.reproduction.named_steps import PlanName, named_step, question_of, recomputing
from p2p_dtfm.sim.scenario.execution import Execution, execution_named
from p2p_dtfm.sim.scenario.files import read_scenario
from p2p_dtfm.sim.scenario.scenario import Scenario

MOST_ROWS = 256
_STRICT = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

ReadRun = Callable[[str, int | None, int | None], RunSpec]
"""Reads a run spec by path or packaged name, with another depth or batch."""


class OwnRow(BaseModel):
    """One measured step, and how it was run. The words are those of `simulate`."""

    model_config = _STRICT
    scenario: str
    """A packaged name, or a path. A relative path starts at the file of rows."""
    seconds: float = Field(gt=0, le=1e9)
    """The time of one step, as measured."""
    system: str = Field(min_length=1, max_length=60)
    run: str = "gpt3-xl"
    layers: int | None = Field(default=None, ge=1)
    global_batch: int | None = Field(default=None, ge=1)
    plan: Literal["ours", "paper", "region", "random", "dtfm"] = "region"
    execution: Literal["ours", "dtfm"] = "dtfm"
    stages: int | None = Field(default=None, ge=1)
    link_efficiency: float = Field(default=1.0, gt=0, le=1)
    recompute: bool | None = None
    codec: str | None = None
    reduction: str | None = None


class OwnRows(BaseModel):
    """A file of rows."""

    model_config = _STRICT
    source: str = Field(min_length=1, max_length=400)
    """Who measured the rows, where and when."""
    kind: Literal["published", "measured here"] = "measured here"
    row: tuple[OwnRow, ...] = Field(min_length=1, max_length=MOST_ROWS)


def read_own_rows(path: Path) -> OwnRows:
    """Read a file of rows, and make paths of scenarios and runs absolute. Raises `UserError` naming
    the row."""
    try:
        rows = OwnRows.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the rows {path}: {error}", "name a TOML file") from error
    except ValidationError as error:
        item = error.errors()[0]
        key = ".".join(str(part + 1) if isinstance(part, int) else part for part in item["loc"])
        raise UserError(
            f"{path}: {key}: {in_plain_words(item)}",
            'write [[row]] tables as docs/reproduce.md shows them, and a source = "..." above',
        ) from error
    except (ValueError, RecursionError) as error:  # not only what tomllib declares
        raise UserError(f"{path} is not valid TOML: {error}", "mend that line") from error
    return rows.model_copy(update={"row": tuple(_beside(row, path) for row in rows.row)})


def _beside(row: OwnRow, path: Path) -> OwnRow:
    """The row with whole paths, so that files beside the file of rows are found from anywhere."""
    there = {}
    for name in ("scenario", "run"):
        file = path.parent / getattr(row, name)
        if file.is_file():
            there[name] = str(file.resolve())
    return row.model_copy(update=there)


def command_of_row(row: OwnRow) -> str:
    """The command that a person types for the simulated figure beside it."""
    words = ["p2p-dtfm", "simulate", row.scenario, "--run", row.run]
    for option, value in (
        ("--layers", row.layers),
        ("--global-batch", row.global_batch),
        ("--plan", row.plan),
        ("--execution", row.execution),
        ("--stages", row.stages if row.plan != "ours" else None),
        ("--codec", row.codec),
        ("--reduction", row.reduction),
    ):
        words += [] if value is None else [option, str(value)]
    if row.link_efficiency != 1:
        words += ["--link-efficiency", str(row.link_efficiency)]
    if row.recompute is not None:
        words.append("--recompute" if row.recompute else "--no-recompute")
    return shlex.join(words)


def simulated_s(row: OwnRow, read_run: ReadRun) -> float:
    """The simulator's seconds for a row. Raises `UserError` as `simulate` does."""
    scenario, spec = _asked(row, read_run)
    plan = PlanName(row.plan)
    how = _carried_out(row, spec, plan)
    return named_step(question_of(scenario, spec, how, row.stages), plan).step.total_ns / 1e9


def row_key(row: OwnRow, read_run: ReadRun) -> str:
    """The key under which a row is kept. It changes when the scenario or the run does."""
    scenario, spec = _asked(row, read_run)
    hashed = blake2b(digest_size=8)
    hashed.update(row.model_dump_json(exclude={"seconds", "system"}).encode())
    hashed.update(repr((scenario.peers, sorted(scenario.links.items()))).encode())
    hashed.update(spec.digest().encode())
    return f"own {hashed.hexdigest()}"


def _asked(row: OwnRow, read_run: ReadRun) -> tuple[Scenario, RunSpec]:
    scenario = read_scenario(row.scenario).with_link_efficiency(row.link_efficiency)
    return scenario, read_run(row.run, row.layers, row.global_batch)


def _carried_out(row: OwnRow, spec: RunSpec, plan: PlanName) -> Execution:
    how = recomputing(execution_named(row.execution, spec.model.layers), row.recompute, spec, plan)
    how = how if row.codec is None else how.with_codec(row.codec)
    return how if row.reduction is None else how.with_reduction(row.reduction)


def own_bars(rows: OwnRows, read_run: ReadRun, seconds: dict[str, float]) -> list[ChartBar]:
    """For each row the measured bar, then the simulated one. `seconds` is by the rows' keys."""
    bars = []
    for row in rows.row:
        scenario, spec = _asked(row, read_run)
        for system, kind, source, value in (
            (row.system, FigureKind(rows.kind), rows.source, row.seconds),
            (
                f"{row.system}, simulated",
                FigureKind.SIMULATED,
                command_of_row(row),
                seconds[row_key(row, read_run)],
            ),
        ):
            bars.append(
                ChartBar(
                    chart=Chart.OWN,
                    case=scenario.name,
                    layers=spec.model.layers,
                    batch=spec.batch.global_batch,
                    system=system,
                    kind=kind,
                    source=source,
                    seconds=value,
                    peers=len(scenario.peers),
                )
            )
    return bars
