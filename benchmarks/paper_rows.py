"""The paper's measured rows, and the simulator's time for each of them under DT-FM's execution."""

from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.sim.paper.published import SCENARIOS, PublishedRow, dtfm_rows
from p2p_dtfm.sim.reproduction.simulated_rows import (
    dtfm_time_s,
    dtfm_times_s,
    with_forward_flops,
)
from p2p_dtfm.sim.scenario.files import read_run_spec, read_scenario
from p2p_dtfm.sim.scenario.scenario import Scenario

Row = PublishedRow
FIT_CASES = ("1", "3", "5")

__all__ = [
    "Row",
    "calibration_rows",
    "dtfm_time_s",
    "dtfm_times_s",
    "measured_rows",
    "paper_scenario",
    "paper_spec",
    "with_forward_flops",
]


def measured_rows() -> list[Row]:
    """The rows of DT-FM scheduled and DT-FM random, of all five cases."""
    return dtfm_rows()


def calibration_rows() -> list[Row]:
    """The rows that were at hand when the simulator was fitted: three cases, four shapes."""
    return [
        row
        for row in dtfm_rows()
        if row.case in FIT_CASES and (row.layers == 24 or (row.layers, row.batch) == (40, 4096))
    ]


def paper_scenario(case: str) -> Scenario:
    return read_scenario(SCENARIOS[case])


def paper_spec(layers: int, batch: int) -> RunSpec:
    """DT-FM's GPT-3 XL with so many layers and sequences."""
    return read_run_spec("gpt3-xl", layers, batch)
