"""What the page shows, as data: every bar and every curve says what it is and where it is from."""

from enum import StrEnum

import msgspec

COMMAND = "p2p-dtfm reproduce --out DIR"


class FigureKind(StrEnum):
    """How a figure came about."""

    PUBLISHED = "published"
    """Measured by the paper's authors, on their machines."""
    SIMULATED = "simulated"
    """A step played in virtual time by the simulator."""
    PREDICTED = "predicted"
    """By the planner's own cost model, before anything was played."""
    MEASURED_HERE = "measured here"
    """By a clock of the machine that made the row, or by the person who gave it."""


class Chart(StrEnum):
    """The chapters that have bars: of the paper's page, of a scenario's, or of both."""

    TABLE = "table"
    SCHEDULER = "scheduler"
    SCALE = "scale"
    PRICES = "prices"
    STEP = "step"
    """How long a step of a scenario is: ours, other placements, bounds."""
    PARTS = "parts"
    """Where a step's time goes, peer by peer."""
    CHANGES = "changes"
    OWN = "own"
    """Rows that somebody else has measured."""


class ChartBar(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One figure."""

    chart: Chart
    case: str
    layers: int
    batch: int
    system: str
    kind: FigureKind
    source: str
    """A publication, or the command that computes this figure again."""
    seconds: float
    """The time of a step, or of what the chart counts."""
    pflops: float | None = None
    tokens_per_dollar: float | None = None
    price_per_hour: float | None = None
    """Dollars for all peers with a stage."""
    peers: int = 64
    cached: bool = False
    """Whether the figure was computed at the time of `made`, and comes along with the program."""


class Curve(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How a search came down, in one seed."""

    case: str
    method: str
    seed: int
    kind: FigureKind
    source: str
    evaluations: list[int]
    seconds: list[float]
    total_s: list[float]
    """The paper's cost of the best found so far."""
    cached: bool = False


class Results(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """All that was computed, or came along."""

    bars: list[ChartBar]
    curves: list[Curve]
    quality: dict[str, dict[str, float]]
    """For each number of peers: the planned step, divided by a lower bound, and seconds of
    planning."""
    levels: dict[str, list[list[int]]]
    """For each case: the groups of the cheapest placement by the paper's cost, as numbers of peers
    in the scenario's order."""


def bars_of(results: Results, chart: Chart) -> list[ChartBar]:
    return [bar for bar in results.bars if bar.chart is chart]


def command_of(scenario: str, layers: int, batch: int, plan: str, execution: str) -> str:
    """The command that a person types for the same figure."""
    return (
        f"p2p-dtfm simulate {scenario} --layers {layers} --global-batch {batch} "
        f"--plan {plan} --execution {execution}"
        + (OURS_AS_COMPARED if execution == "ours" else "")
        + (" --stages 8" if plan != "ours" else "")
    )


LINK_EFFICIENCY = 0.85
"""The fraction of their stated rates that links reach in our own rows. DT-FM's has its fitted
one."""
OURS_AS_COMPARED = f" --codec fp16 --recompute --link-efficiency {LINK_EFFICIENCY}"
"""Further options of `simulate`, so that it carries a plan out as our own rows have it."""
