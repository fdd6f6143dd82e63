"""All rows: computed now, taken up from a run that was cut short, or come along as cached."""

import json
from collections.abc import Callable
from functools import cache, partial
from hashlib import blake2b
from itertools import product
from pathlib import Path
from typing import Any

from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.sim.paper.published import SCENARIOS, published_rows, published_source
from p2p_dtfm.sim.reproduction.bars import (
    COMMAND,
    Chart,
    ChartBar,
    Curve,
    FigureKind,
    Results,
    command_of,
)
from p2p_dtfm.sim.reproduction.convergence import CASES, METHODS, SEEDS
from p2p_dtfm.sim.reproduction.price_rows import WORTH_IT, price_bar, what_if_of
from p2p_dtfm.sim.reproduction.simulated_rows import RUN, dtfm_sequences
from p2p_dtfm.sim.reproduction.swarm.own_rows import (
    OwnRows,
    ReadRun,
    own_bars,
    row_key,
    simulated_s,
)
from p2p_dtfm.sim.reproduction.tasks import (
    BATCHES,
    LAYERS,
    PRICED,
    SCALE,
    Task,
    priced_swarms,
    tasks,
)
from p2p_dtfm.sim.scenario.execution import OURS
from p2p_dtfm.sim.scenario.files import packaged_configs, read_run_spec, read_scenario
from p2p_dtfm.sim.scenario.scenario_snapshot import workload_in

CACHED = Path(__file__).with_name("cached_rows.json")
ROWS_FILE = "rows.jsonl"
_PROGRAM = Path(__file__).parents[2]

Shape = tuple[str, int, int]
"""A case, its layers and its sequences."""
SHAPES: tuple[Shape, ...] = tuple(product(SCENARIOS, LAYERS, BATCHES))

Own = tuple[OwnRows, ReadRun]

Told = Callable[[int, int, str], None]
"""Told the rows done, the rows in all, and the row that comes now."""


def program_digest() -> str:
    """The digest of all that rows depend on: rows that another program made are not taken up."""
    hashed = blake2b(digest_size=8)
    places = [_PROGRAM / "core", _PROGRAM / "sim", packaged_configs()]
    for place in places:
        for path in sorted(place.rglob("*")):
            if path.suffix in (".py", ".toml", ".c", ".json") and path != CACHED:
                hashed.update(path.read_bytes())
    return hashed.hexdigest()


def cached_rows() -> dict[str, Any]:
    """{"command", "made", "rows"}: rows by their task's key."""
    rows: dict[str, Any] = json.loads(CACHED.read_bytes())
    return rows


class Collection:
    """Rows in a directory, one line of JSON each."""

    def __init__(self, directory: Path, quick: bool, own: Own | None = None) -> None:
        self.directory = directory
        self.quick = quick
        self.own = own
        """Rows of the user's own, besides the paper's."""
        self.rows: dict[str, Any] = {}
        self.from_cache: set[str] = set()
        self._digest = program_digest()

    def collect(self, told: Told) -> Results:
        """Collect all rows. Raises `UserError` where the directory cannot be written."""
        own = {} if self.own is None else own_tasks(*self.own)
        wanted = [*tasks(), *own.values()]
        self._take_up()
        if self.quick:
            known = cached_rows()["rows"]
            for task in wanted:
                if not task.quick and task.key not in self.rows and task.key in known:
                    self.rows[task.key] = known[task.key]
                    self.from_cache.add(task.key)
        for number, task in enumerate(wanted):
            told(number, len(wanted), task.told)
            if task.key not in self.rows:
                self._keep(task)
        told(len(wanted), len(wanted), "drawing")
        results = _results(self.rows, self.from_cache)
        if self.own is not None:
            results.bars.extend(own_bars(*self.own, {key: self.rows[key] for key in own}))
        return results

    def _take_up(self) -> None:
        try:
            lines = (self.directory / ROWS_FILE).read_text(encoding="utf-8").splitlines()
        except OSError:
            return
        for line in lines:
            try:
                row = json.loads(line)
            except ValueError:
                continue  # cut short while it was written
            if row.get("program") == self._digest:
                self.rows[row["key"]] = row["value"]

    def _keep(self, task: Task) -> None:
        value = self.rows[task.key] = task.make()
        line = json.dumps({"program": self._digest, "key": task.key, "value": value})
        try:
            with (self.directory / ROWS_FILE).open("a", encoding="utf-8") as file:
                file.write(line + "\n")
        except OSError as error:
            raise UserError(
                f"cannot write in {self.directory}: {error.strerror}", "choose another --out"
            ) from error


def own_tasks(rows: OwnRows, read_run: ReadRun) -> dict[str, Task]:
    """A task for each row that differs from those before it. Raises `UserError`."""
    found: dict[str, Task] = {}
    for number, row in enumerate(rows.row, 1):
        key = row_key(row, read_run)
        told = f"own row {number}: {row.system}"
        found.setdefault(key, Task(key, told, True, partial(simulated_s, row, read_run)))
    return found


@cache
def _layer_pflop(layers: int) -> float:
    """10^15 operations of one layer and one sequence: forward once, and backward twice that.
    Recomputed ones do not count."""
    workload = workload_in(read_scenario(SCENARIOS["1"]), read_run_spec(RUN, layers), OURS)
    return 3 * workload.block.forward_flops / 1e15


def model_pflop(layers: int, sequences: int) -> float:
    """10^15 operations of a step."""
    return layers * sequences * _layer_pflop(layers)


def _results(rows: dict[str, Any], from_cache: set[str]) -> Results:
    bars = [
        *_published_bars(),
        *_simulated_bars(rows, from_cache),
        *_our_bars(rows, from_cache),
        *_scheduler_bars(rows, from_cache),
        *_scale_bars(rows, from_cache),
        *_price_bars(rows, from_cache),
    ]
    quality = {
        str(count): {name: rows[f"scale {count}"][name] for name in ("step_s", "over_bound")}
        for count in SCALE
    }
    levels = {case: rows[f"levels {case}"] for case in CASES}
    curves = _curves(rows, from_cache)
    return Results(bars=bars, curves=curves, quality=quality, levels=levels)


def _table_bar(shape: Shape, sequences: int, seconds: float, **fields: Any) -> ChartBar:
    """A bar of the paper's table. `sequences` is how many a step of `seconds` computed."""
    case, layers, batch = shape
    pflops = model_pflop(layers, sequences) / seconds
    table: dict[str, Any] = {"chart": Chart.TABLE, "case": case, "layers": layers, "batch": batch}
    return ChartBar(**table, seconds=seconds, pflops=pflops, **fields)


def _published_bars() -> list[ChartBar]:
    return [
        _table_bar(
            (row.case, row.layers, row.batch),
            _sequences(row.system, row.layers, row.batch),
            row.measured_s,
            system=row.system,
            kind=FigureKind.PUBLISHED,
            source=published_source(),
        )
        for row in published_rows()
    ]


def _sequences(system: str, layers: int, batch: int) -> int:
    return dtfm_sequences(layers, batch) if system.startswith("DT-FM") else batch


def _simulated_bars(rows: dict[str, Any], from_cache: set[str]) -> list[ChartBar]:
    systems = {"region": "DT-FM scheduled", "random": "DT-FM random"}
    return [
        _table_bar(
            (case, layers, batch),
            dtfm_sequences(layers, batch),
            rows[key][str(batch)],
            system=f"{system}, simulated",
            kind=FigureKind.SIMULATED,
            source=command_of(SCENARIOS[case], layers, batch, placement, "dtfm"),
            cached=key in from_cache,
        )
        for case, layers, batch in SHAPES
        for placement, system in systems.items()
        for key in [f"dtfm {case} {placement} {layers}"]
    ]


def _our_bars(rows: dict[str, Any], from_cache: set[str]) -> list[ChartBar]:
    made = (
        ("ours", FigureKind.SIMULATED, "simulated_s"),
        ("ours, predicted", FigureKind.PREDICTED, "predicted_s"),
    )
    return [
        _table_bar(
            (case, layers, batch),
            batch,
            rows[key][name],
            system=system,
            kind=kind,
            source=command_of(SCENARIOS[case], layers, batch, "ours", "ours"),
            cached=key in from_cache,
        )
        for case, layers, batch in SHAPES
        for key in [f"ours {case} {layers} {batch}"]
        for system, kind, name in made
    ]


_PLANS = {
    "region order": "region",
    "random ranks": "random",
    "optimum of DT-FM's cost": "paper",
    "ours": "ours",
}


def _scheduler_bars(rows: dict[str, Any], from_cache: set[str]) -> list[ChartBar]:
    bars = []
    layers, batch = LAYERS[0], BATCHES[0]
    for case, scenario in SCENARIOS.items():
        key, own = f"scheduler {case}", f"ours {case} {layers} {batch}"
        for system, seconds in (rows[key] | {"ours": rows[own]["simulated_s"]}).items():
            plan = _PLANS.get(system)
            bars.append(
                ChartBar(
                    chart=Chart.SCHEDULER,
                    case=case,
                    layers=layers,
                    batch=batch,
                    system=system,
                    kind=FigureKind.SIMULATED,
                    source=command_of(scenario, layers, batch, plan, "ours") if plan else COMMAND,
                    seconds=seconds,
                    pflops=model_pflop(layers, batch) / seconds,
                    cached=(own if system == "ours" else key) in from_cache,
                )
            )
    return bars


def _scale_bars(rows: dict[str, Any], from_cache: set[str]) -> list[ChartBar]:
    return [
        ChartBar(
            chart=Chart.SCALE,
            case="large",
            layers=24,
            batch=batch,
            system="planning",
            kind=FigureKind.MEASURED_HERE,
            source=COMMAND,
            seconds=rows[f"scale {count}"]["planned_s"],
            peers=count,
            cached=f"scale {count}" in from_cache,
        )
        for count, batch in SCALE.items()
    ]


def _price_bars(rows: dict[str, Any], from_cache: set[str]) -> list[ChartBar]:
    spec, everybody = read_run_spec(RUN), read_scenario(PRICED)
    command = f"p2p-dtfm plan {PRICED} --run {RUN}"
    sources = {
        name: f'{command} --what-if "{gone}"' if (gone := what_if_of(everybody, swarm)) else command
        for name, swarm in priced_swarms()
    } | {WORTH_IT: f"{command} --objective cost"}
    return [
        price_bar(name, rows[key], PRICED, spec, source, key in from_cache)
        for name, source in sources.items()
        for key in [f"price {name}"]
    ]


def _curves(rows: dict[str, Any], from_cache: set[str]) -> list[Curve]:
    return [
        Curve(
            case=case,
            method=method,
            seed=seed,
            kind=FigureKind.MEASURED_HERE,
            source=COMMAND,
            cached=key in from_cache,
            **rows[key],
        )
        for case in CASES
        for method in METHODS
        for seed in range(SEEDS)
        for key in [f"curve {case} {method} {seed}"]
    ]
