"""How long a fault holds up a swarm of real daemons, and what faults cost it.

    python -m benchmarks.recovery [--quick] [--json] [--seeds 2 3 5]
        [--only recovery|goodput]

*Recovery*: `p2p-dtfm chaos` with eight peers on `tiny` and twenty faults for each seed. Time runs
from the fault to the next commit, less a usual step. Faults that fall together hold up one another,
so limits are for those that came alone; the others are shown beside them. The
lower bound is how soon anyone can know of it: at once where a process ends, since its streams
break; after the least silence that counts as death where it is stopped or cut off.

*Goodput*: eight emulated devices over shaped links, one fault every ten steps, with steps of
seconds, as they are in the runs that this is for. It is the time that the steps take without
faults in each view over the time they took; planning, moving states and computing anew included.
"""

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from p2p_dtfm.core.consensus.actions import SECOND_NS
from p2p_dtfm.core.liveness.liveness import LAN_LIVENESS
from p2p_dtfm.sim.scenario.files import read_run_spec
from p2p_dtfm.testbed.recovery.phases import PHASES

SEEDS = (2, 3, 5)
QUICK_SEED = 31
"""A seed of three peers and one fault: a kill, and a new start after 3.6 s."""
LIMITS_S = {"kill": 2.0, "pause": 3.0, "cut": 3.0, "partition": 8.0}
SILENCE_S = LAN_LIVENESS.together_ns / SECOND_NS
GOODPUT_TARGET = 0.99
SCENARIO = Path(__file__).parent / "scenarios" / "eight-slow-machines.toml"
GOODPUT_FAULTS = 10
GOODPUT_SEED = 1


def chaos(*arguments: str) -> dict[str, Any]:
    """The JSON object of one run; what went wrong is in its `violations`."""
    command = [sys.executable, "-m", "p2p_dtfm", "chaos", *arguments, "--json"]
    with TemporaryDirectory() as directory:
        done = subprocess.run(
            [*command, "--keep", f"{directory}/kept"], capture_output=True, text=True
        )
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report


def recovery_rows(reports: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    rows = []
    reports = list(reports)
    for kind in sorted({kind for report in reports for kind in report["recovery_s"]}):
        limit_s = LIMITS_S.get(kind)
        alone = _over_runs([report["recovery_alone_s"] for report in reports], kind)
        worst_s = alone["worst_s"]
        rows.append(
            {
                "fault": kind,
                **_over_runs([report["recovery_s"] for report in reports], kind),
                "alone": alone,
                "lower_bound_s": SILENCE_S if kind in ("pause", "cut", "partition") else 0.0,
                "limit_s": limit_s,
                "met": None if None in (limit_s, worst_s) else worst_s <= limit_s,
            }
        )
    return rows


def _over_runs(runs: list[dict[str, Any]], key: str) -> dict[str, Any]:
    """The median of the runs' medians, and the worst of all."""
    found = [run[key] for run in runs if key in run]
    if not found:
        return {"times": 0, "median_s": None, "worst_s": None}
    return {
        "times": sum(times["count"] for times in found),
        "median_s": round(statistics.median(times["median"] for times in found), 2),
        "worst_s": round(max(times["worst"] for times in found), 2),
    }


def phase_rows(reports: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each kind of fault, each phase in its order: the median of the runs' medians."""
    phases = [report["recovery_phases_s"] for report in reports]
    return [
        {"fault": kind, "phase": phase, **_over_runs([run.get(kind, {}) for run in phases], phase)}
        for kind in sorted({kind for run in phases for kind in run})
        for phase in PHASES
    ]


def summary(report: dict[str, Any]) -> dict[str, Any]:
    keys = ("seed", "ok", "committed_steps", "max_loss_difference", "usual_step_s", "goodput")
    return {key: report[key] for key in keys} | {"violations": report["violations"]}


def measure(seeds: Iterable[int], quick: bool, only: str | None) -> dict[str, Any]:
    if only == "goodput":
        reports = []
    elif quick:
        reports = [one_kill()]
    else:
        reports = [chaos("--peers", "8", "--faults", "20", "--seed", str(s)) for s in seeds]
    result: dict[str, Any] = {
        "runs": [summary(report) for report in reports],
        "rows": recovery_rows(reports),
        "phases": phase_rows(reports),
        "goodput_target": GOODPUT_TARGET,
    }
    if only == "goodput" or (only is None and not quick):
        result["goodput"] = goodput()
    return result


def one_kill() -> dict[str, Any]:
    """Three peers with a model so small that starting, noticing and planning are timed."""
    spec = read_run_spec("tiny")
    changes = {
        "model": spec.model.model_copy(update={"layers": 2, "width": 64}),
        "batch": spec.batch.model_copy(update={"global_batch": 12}),
        "evaluation": spec.evaluation.model_copy(update={"sequences": 8}),
    }
    with TemporaryDirectory() as directory:
        run = Path(directory) / "run.json"
        run.write_text(spec.model_copy(update=changes).model_dump_json())
        faults = ("--faults", "1", "--seed", str(QUICK_SEED))
        return chaos("--peers", "3", "--run", str(run), *faults)


def goodput() -> dict[str, Any]:
    """Microbatches have one sequence, so that the remaining peers can share them evenly. No step of
    it evaluates besides: the seconds that this takes belong to no fault."""
    spec = read_run_spec("tiny")
    changes = {
        "batch": spec.batch.model_copy(update={"microbatch": 1}),
        "evaluation": spec.evaluation.model_copy(update={"every_steps": spec.total_steps + 1}),
    }
    with TemporaryDirectory() as directory:
        run = Path(directory) / "run.json"
        run.write_text(spec.model_copy(update=changes).model_dump_json())
        faults = ("--faults", str(GOODPUT_FAULTS), "--seed", str(GOODPUT_SEED))
        report = chaos(str(SCENARIO), "--run", str(run), *faults)
    return summary(report) | {"emulated": report["emulated"], "shaped_links": True}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument(
        "--quick", action="store_true", help="three peers with a smaller model, one kill"
    )
    parser.add_argument("--only", choices=("recovery", "goodput"))
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    result = measure(arguments.seeds, arguments.quick, arguments.only)
    if arguments.json:
        print(json.dumps(result))
        return
    names = ("times", "median", "worst")
    print(f"{'':10} {'alone':^21} {'all':^21}")
    print("fault     ", *(f"{name:>6}" for name in (*names, *names, "bound", "limit")), " seconds")
    for row in result["rows"]:
        figures = [
            *(
                each[key]
                for each in (row["alone"], row)
                for key in ("times", "median_s", "worst_s")
            ),
            row["lower_bound_s"],
            row["limit_s"],
        ]
        shown = ("-" if figure is None else str(figure) for figure in figures)
        print(f"{row['fault']:10}", *(f"{text:>6}" for text in shown))
    for row in result["phases"]:
        print(f"{row['fault']:10} {row['phase']:10} {row['median_s']} s, worst {row['worst_s']} s")
    for run in (*result["runs"], *([result["goodput"]] if "goodput" in result else [])):
        print(
            f"seed {run['seed']}: {run['committed_steps']} steps of {run['usual_step_s']:.2f} s, "
            f"goodput {run['goodput']:.1%}"
            + (" (emulated devices, shaped links)" if run.get("emulated") else "")
            + ("" if run["ok"] else f"; violated: {'; '.join(run['violations'])}")
        )


if __name__ == "__main__":
    main()
