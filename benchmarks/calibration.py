"""Fits the simulator's DT-FM execution to the paper's table, and says how far each row is off.

    python -m benchmarks.calibration            # fit, cross-validate, report
    python -m benchmarks.calibration --quick    # report the constants that ship

Fitted: one compute rate and three constants of the communicator, shared by all cases. They are
fitted on the rows of 24 layers and validated on those of 40; then, for the three cases in turn,
fitted without a case and validated on it. Writes calibration.json.
"""

import argparse
import contextlib
import json
import math
import statistics
import sys
from pathlib import Path

from benchmarks.paper_rows import (
    Row,
    calibration_rows,
    dtfm_time_s,
    dtfm_times_s,
    paper_scenario,
    with_forward_flops,
)
from p2p_dtfm.sim.scenario.execution import DTFM_COMMUNICATOR, Communicator
from p2p_dtfm.sim.scenario.scenario import Scenario

FIT_ROWS = {(24, 1024), (24, 2048), (24, 4096)}
NAMES = ("forward_tflops", "efficiency", "receive_buffer_bytes", "window_bytes")
START = (54.0, 0.85, 7e6, 3e6)
UPPER = (math.inf, 1.0, math.inf, math.inf)
FIRST_STEP, LAST_STEP = 0.08, 0.004

Constants = tuple[float, ...]


class Model:
    """The simulator as a function of the constants. It remembers what it has simulated so far."""

    def __init__(self) -> None:
        self._scenarios = {case: paper_scenario(case) for case in ("1", "3", "5")}
        self._linear: dict[tuple[object, ...], list[tuple[float, float]]] = {}

    def scenario(self, case: str, constants: Constants) -> Scenario:
        return with_forward_flops(self._scenarios[case], round(constants[0] * 1e12))

    def quick_s(self, row: Row, constants: Constants) -> float:
        """A row's time from one flush and two, as all flushes after the first are alike."""
        runs = self.flushes(row.case, row.placement, row.layers, constants)
        count = row.batch // 512
        return statistics.median(first + (count - 1) * each for first, each in runs)

    def flushes(
        self, case: str, placement: str, layers: int, constants: Constants
    ) -> list[tuple[float, float]]:
        """(time of a step of one flush, time of each further flush) of each run."""
        key = (case, placement, layers, constants)
        if key not in self._linear:
            scenario = self.scenario(case, constants)
            link = communicator(constants)
            one = dtfm_times_s(scenario, placement, layers, 512, link)
            two = dtfm_times_s(scenario, placement, layers, 1024, link)
            self._linear[key] = [(sum(a), b[0] - a[0]) for a, b in zip(one, two, strict=True)]
        return self._linear[key]


def communicator(constants: Constants) -> Communicator:
    return Communicator(
        efficiency=constants[1],
        receive_buffer_bytes=round(constants[2]),
        window_bytes=round(constants[3]),
    )


def loss(model: Model, rows: list[Row], constants: Constants) -> float:
    """Mean squared logarithm of simulated over measured."""
    return statistics.fmean(
        math.log(model.quick_s(row, constants) / row.measured_s) ** 2 for row in rows
    )


def fit(model: Model, rows: list[Row]) -> Constants:
    """Pattern search (Hooke and Jeeves 1961) in relative steps."""
    best, step = START, FIRST_STEP
    least = loss(model, rows, best)
    while step > LAST_STEP:
        before = best
        for axis in range(len(best)):
            for factor in (1 + step, 1 / (1 + step)):
                tried = list(best)
                tried[axis] = min(UPPER[axis], tried[axis] * factor)
                value = loss(model, rows, tuple(tried))
                if value < least:
                    best, least = tuple(tried), value
                    break
        if best == before:
            step /= 2
        else:  # once more in the direction that helped
            further = tuple(
                min(top, b * b / a) for a, b, top in zip(before, best, UPPER, strict=True)
            )
            value = loss(model, rows, further)
            if value < least:
                best, least = further, value
    return best


def report(rows: list[Row], constants: Constants, model: Model) -> dict[str, object]:
    """Every row simulated in full, with its error."""
    table = []
    print("\nrow                          measured  simulated   error")
    for row in rows:
        scenario = model.scenario(row.case, constants)
        simulated = dtfm_time_s(row, scenario, communicator(constants))
        error = simulated / row.measured_s - 1
        fitted = (row.layers, row.batch) in FIT_ROWS
        print(
            f"{row.name:28s} {row.measured_s:8.2f} {simulated:10.2f} {error:+7.1%}"
            f"{'  (fitted)' if fitted else ''}"
        )
        table.append(
            {
                "row": row.name,
                "measured_s": row.measured_s,
                "simulated_s": round(simulated, 3),
                "error": round(error, 4),
                "fitted": fitted,
            }
        )
    summary: dict[str, object] = {"rows": table}
    for title, kept in (
        ("fitted rows", [r for r in table if r["fitted"]]),
        ("validation rows", [r for r in table if not r["fitted"]]),
        ("all rows", table),
    ):
        errors = [abs(r["error"]) for r in kept]
        middle, worst = statistics.median(errors), max(errors)
        print(f"{title}: median error {middle:.1%}, worst {worst:.1%}")
        summary[title] = {"median": middle, "worst": worst}
    return summary


def derived(rows: list[Row], constants: Constants, model: Model) -> list[dict[str, object]]:
    """Time per flush and reduction from slopes and intercepts of the L24 rows, both ways."""
    table = []
    print("\ncase placement   flush measured simulated   reduction measured simulated")
    for case in ("1", "3", "5"):
        for placement in ("region", "random"):
            points = [
                (row.batch // 512, row.measured_s)
                for row in rows
                if (row.case, row.placement, row.layers) == (case, placement, 24)
            ]
            slope, intercept = statistics.linear_regression(*zip(*points, strict=True))
            runs = model.flushes(case, placement, 24, constants)
            each = statistics.median(flush for _, flush in runs)
            rest = statistics.median(first - flush for first, flush in runs)
            print(
                f"{case:4s} {placement:10s} {slope:14.2f} {each:9.2f} {intercept:20.2f} {rest:9.2f}"
            )
            table.append(
                {
                    "case": case,
                    "placement": placement,
                    "flush_measured_s": round(slope, 3),
                    "flush_simulated_s": round(each, 3),
                    "reduction_measured_s": round(intercept, 3),
                    "reduction_simulated_s": round(rest, 3),
                }
            )
    return table


def cross_validate(rows: list[Row], model: Model) -> list[dict[str, object]]:
    """Fit without a case, then simulate all rows of that case."""
    table = []
    print("\nfitted without case   median error there   worst")
    for case in ("1", "3", "5"):
        kept = [r for r in rows if r.case != case and (r.layers, r.batch) in FIT_ROWS]
        constants = fit(model, kept)
        errors = [
            abs(model.quick_s(row, constants) / row.measured_s - 1)
            for row in rows
            if row.case == case
        ]
        middle, worst = statistics.median(errors), max(errors)
        print(f"{case:21s} {middle:12.1%} {worst:14.1%}   {rounded(constants)}")
        table.append(
            {
                "case": case,
                "constants": rounded(constants),
                "median": middle,
                "worst": worst,
            }
        )
    return table


def rounded(constants: Constants) -> dict[str, float]:
    return {name: float(f"{value:.4g}") for name, value in zip(NAMES, constants, strict=True)}


def shipped() -> Constants:
    """The compute rate of the scenario files and the communicator of the package."""
    flops = paper_scenario("1").peers[0].forward_flops
    assert flops is not None
    link = DTFM_COMMUNICATOR
    return (
        flops / 1e12,
        link.efficiency,
        float(link.receive_buffer_bytes),
        float(link.window_bytes),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the constants that ship")
    parser.add_argument("--out", type=Path, default=Path("calibration.json"))
    parser.add_argument("--json", action="store_true", help="print what --out gets, no table")
    options = parser.parse_args()
    with contextlib.redirect_stdout(sys.stderr if options.json else sys.stdout):
        result = calibrated(options.quick)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    if options.json:
        print(json.dumps(result))


def calibrated(quick: bool) -> dict[str, object]:
    """All figures; tables are printed on the way."""
    model, rows = Model(), calibration_rows()
    result: dict[str, object] = {}
    constants = shipped()
    if not quick:
        fitted = fit(model, [row for row in rows if (row.layers, row.batch) in FIT_ROWS])
        print("fitted: ", rounded(fitted))
        print("shipped:", rounded(constants))
        result["fitted"] = rounded(fitted)
    result["shipped"] = rounded(constants)
    result.update(report(rows, constants, model))
    result["derived"] = derived(rows, constants, model)
    if not quick:
        result["cross_validation"] = cross_validate(rows, model)
    return result


if __name__ == "__main__":
    main()
