"""What a run of chaos does to which peers: from a seed, a scenario's file, or an earlier run."""

import json
import math
from dataclasses import dataclass
from pathlib import Path

from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.sim.scenario.files import read_scenario
from p2p_dtfm.sim.scenario.scenario import Scenario, ScenarioFault
from p2p_dtfm.testbed.chaos_schedule import ChaosFault, chaos_schedule

PEERS = 6
SEED = 1
STEPS_AFTER = 20
"""Steps without faults at the end."""
SPARE_STEPS = 60
"""Spare steps for each fault: one that needs all other peers well may come much later than due."""
SPARE_STEPS_PER_S = 60
"""Spare steps for each second that a fault lasts. A small model on a fast machine must not reach
its end meanwhile."""
STEP_LIMIT_S = 10.0
"""If no step is committed, a fault that lasts some steps ends after so many seconds for each."""
FAULTS = 10
"""How many faults by chance, where neither the command nor the scenario says."""
AT_ONCE = ("corrupt", "join", "leave")


@dataclass(frozen=True)
class ChaosCase:
    """`peers` are those that begin; the schedule may let others join."""

    scenario: str | None
    run: str
    seed: int
    peers: tuple[str, ...]
    schedule: tuple[ChaosFault, ...]

    @property
    def total_steps(self) -> int:
        """Steps of the run spec; the swarm is ended once nothing more is to happen to it."""
        last = max((fault.at_step + fault.lasts_steps for fault in self.schedule), default=0)
        seconds = sum(fault.lasts_s or 0.0 for fault in self.schedule)
        spare = SPARE_STEPS * len(self.schedule) + math.ceil(SPARE_STEPS_PER_S * seconds)
        return last + STEPS_AFTER + spare

    @property
    def newcomers(self) -> tuple[str, ...]:
        """Peers that join and are not among those that begin."""
        joining = (fault.peers[0] for fault in self.schedule if fault.kind == "join")
        return tuple(dict.fromkeys(name for name in joining if name not in self.peers))

    def played(self) -> Scenario | None:
        """The scenario with all who take part at some time.

        A newcomer that its file does not name is like one of its peers. Raises `UserError`.
        """
        if self.scenario is None:
            return None
        scenario = read_scenario(self.scenario)
        known = [peer.name for peer in scenario.peers]
        unknown = [name for name in self.newcomers if name not in known]
        twins = {name: known[number % len(known)] for number, name in enumerate(unknown)}
        return scenario.with_twins(twins)


def chaos_case(
    scenario_name: str | None, peers: int | None, seed: int | None, faults: int | None, run: str
) -> ChaosCase:
    """`faults`: how many faults by chance; None: those of the scenario, if it has any. Any other
    argument that is None takes its usual value.

    Raises `UserError`, also for an argument that would change nothing.
    """
    drawn_by = SEED if seed is None else seed
    by_chance = FAULTS if faults is None else faults
    if scenario_name is None:
        names = tuple(f"peer-{number}" for number in range(peers or PEERS))
        return ChaosCase(None, run, drawn_by, names, chaos_schedule(names, drawn_by, by_chance))
    if peers is not None:
        raise UserError("a scenario says which peers there are", "leave out --peers")
    scenario = read_scenario(scenario_name)
    names = tuple(peer.name for peer in scenario.peers)
    if faults is not None or not scenario.faults:
        schedule = chaos_schedule(names, drawn_by, by_chance)
        return ChaosCase(scenario_name, run, drawn_by, names, schedule)
    if seed is not None:
        raise UserError(
            f"{scenario.name} states its faults, so that nothing is drawn by --seed",
            ("leave out --seed", "or say how many faults are drawn in place of them: --faults N"),
        )
    stated = sorted(scenario.faults, key=lambda fault: fault.at_step)
    first = {fault.peer: fault.kind for fault in reversed(stated)}
    begin = tuple(name for name in names if first.get(name) != "join")
    if not begin:
        raise UserError(
            f"in {scenario.name} every peer joins later", "let one be there from the beginning"
        )
    return ChaosCase(scenario_name, run, drawn_by, begin, tuple(map(_of_scenario, stated)))


def _of_scenario(fault: ScenarioFault) -> ChaosFault:
    whom = (fault.peer, fault.other) if fault.other else (fault.peer,)
    kind = "partition" if fault.kind == "cut" and not fault.other else fault.kind
    lasts_s: float | None = fault.seconds or fault.steps * STEP_LIMIT_S
    if not lasts_s and kind not in AT_ONCE:
        lasts_s = None
    return ChaosFault(fault.at_step, kind, whom, lasts_s, fault.steps, fault.factor)


def replayed_case(path: Path) -> ChaosCase:
    """The case of a JSON object that chaos wrote. Raises `UserError`."""
    try:
        held = json.loads(path.read_text())
        schedule = tuple(
            ChaosFault(
                f["at_step"],
                f["kind"],
                tuple(f["peers"]),
                f["lasts_s"],
                f.get("lasts_steps", 0),
                f.get("factor", 1.0),
            )
            for f in held["schedule"]
        )
        return ChaosCase(
            held["scenario"], held["run"], held["seed"], tuple(held["peers"]), schedule
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path} does not hold a run of chaos ({error!r})",
            "give a file that was written by: p2p-dtfm chaos --json > FILE",
        ) from error
