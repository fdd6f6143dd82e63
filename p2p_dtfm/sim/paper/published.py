"""What the paper's authors measured: seconds per iteration on 64 V100s, five cases, nine shapes."""

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

SCENARIOS = {
    "1": "paper-1-data-center",
    "2": "paper-2-spot-as-run",
    "3": "paper-3-two-sites",
    "4": "paper-4-regional-as-run",
    "5": "paper-5-world-wide-as-run",
}
"""The packaged scenario that plays each case."""
PLANNED_SCENARIOS = SCENARIOS | {
    "2": "paper-2-spot",
    "4": "paper-4-regional",
    "5": "paper-5-world-wide",
}
"""The packaged scenarios as the paper's scheduler saw them."""
TITLES = {
    "1": "data center",
    "2": "spot instances",
    "3": "two sites",
    "4": "four regions of the United States",
    "5": "world-wide",
}
STAGES = 8
PLACEMENTS = {"DT-FM scheduled": "region", "DT-FM random": "random"}
"""The systems that the simulator plays, and how their peers were ordered."""


@dataclass(frozen=True, slots=True)
class PublishedRow:
    """One measured figure."""

    case: str
    layers: int
    batch: int
    system: str
    measured_s: float

    @property
    def placement(self) -> str:
        """The placement, for DT-FM's own systems."""
        return PLACEMENTS[self.system]

    @property
    def name(self) -> str:
        return f"case {self.case} L{self.layers} B{self.batch} {self.system}"


@lru_cache(maxsize=1)
def _data() -> dict[str, Any]:
    data: dict[str, Any] = json.loads(Path(__file__).with_name("dtfm_measured.json").read_bytes())
    return data


def published_source() -> str:
    """Where the figures come from."""
    source: str = _data()["source"]
    return source


def published_rows() -> list[PublishedRow]:
    """Every figure of every system."""
    return [
        PublishedRow(case, *_shape(key), system, seconds)
        for case, table in sorted(_data()["cases"].items())
        for key, figures in table.items()
        for system, seconds in figures.items()
    ]


def dtfm_rows() -> list[PublishedRow]:
    """The rows of DT-FM itself, which the simulator plays."""
    return [row for row in published_rows() if row.system in PLACEMENTS]


def _shape(key: str) -> tuple[int, int]:
    layers, batch = (int(part[1:]) for part in key.split())
    return layers, batch
