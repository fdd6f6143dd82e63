"""How good any plan is in a scenario of eight daemons: a long search with the simulator as judge.

    python -m benchmarks.plan_search [--scenario NAME] [--steps MOVES] [--quick] [--json]

Simulated annealing over whole plans: who holds how many layers in which pipeline, microbatches, how
many are in flight, and who is a spare. It begins with the planner's plan and, for each further
seed, with a random one. Where all come to the same step, a better plan is not likely to exist. The
search uses nothing of the planner's cost model. Beside it stand the planner's plan and region
order.
"""

import math
import random
from typing import Any

import msgspec

from benchmarks.command_line import conclude, parse_options
from benchmarks.emulated_swarm import EXECUTION, emulated_spec, scenario_file
from benchmarks.placement_daemons import SCENARIO_NAMES, plan_named
from p2p_dtfm.core.protocol.plan import Pipeline, Plan, Stage
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.sim.scenario.scenario import Scenario
from p2p_dtfm.sim.scenario.scenario_snapshot import workload_in
from p2p_dtfm.sim.step_time.simulator import simulate_step

MOVES, QUICK_MOVES = 12_000, 1_500
SEEDS = 3
HOT, COLD = 0.02, 0.0005
"""The share of a step by which a move may lengthen it, in the beginning and in the end."""
NO_LIMIT = 1 << 20
DEPTHS = (1, 2, 3, 4, 5, 6, 8, 10, NO_LIMIT)
START_ATTEMPTS = 10_000


class Place(msgspec.Struct):
    peer: str
    layers: int
    most_in_flight: int = NO_LIMIT


class Line(msgspec.Struct):
    """A pipeline."""

    microbatches: int
    places: list[Place]


class Search:
    """Annealing of one scenario's plans."""

    def __init__(self, scenario: Scenario, spec: RunSpec, seed: int) -> None:
        self.scenario = scenario
        self.workload = workload_in(scenario, spec, EXECUTION)
        self.memory = {peer.name: peer.memory_bytes for peer in scenario.peers}
        self.chance = random.Random(seed)
        self._known: dict[str, int] = {}

    def best(self, lines: list[Line], moves: int) -> tuple[int, list[Line]]:
        """(nanoseconds of a step, plan) of the best of so many moves."""
        now_ns = self.step_ns(lines)
        assert now_ns is not None, "a search begins with a plan"
        best = now_ns, lines
        for move in range(moves):
            moved = self._moved(lines)
            step_ns = self.step_ns(moved) if moved else None
            if moved is None or step_ns is None:
                continue
            heat = HOT * (COLD / HOT) ** (move / moves)
            if self.chance.random() < math.exp(min(0.0, (now_ns - step_ns) / now_ns / heat)):
                lines, now_ns = moved, step_ns
                best = min(best, (now_ns, lines), key=lambda found: found[0])
        return best

    def random_start(self) -> list[Line]:
        """Pipelines of shuffled peers with their layers handed on until all have memory."""
        names = list(self.memory)
        self.chance.shuffle(names)
        count = self.chance.choice((1, 2, 3))
        lines = self._filled(
            [Line(1, [Place(n, 1) for n in names[k::count]]) for k in range(count)]
        )
        for _ in range(START_ATTEMPTS):
            if lines is not None and self.step_ns(lines) is not None:
                return lines
            lines = (self._moved(lines) if lines else None) or lines
        raise SystemExit(f"no plan for {self.scenario.name} was found at random")

    def plan(self, lines: list[Line]) -> Plan | None:
        """None if a stage does not fit."""
        pipelines, first = [], 0
        for line in lines:
            stages, layer = [], 0
            for place in line.places:
                end = layer + place.layers
                costs = [self.workload.cost(each) for each in range(layer, end)]
                left = self.memory[place.peer] - sum(cost.state_bytes for cost in costs)
                room = left // sum(cost.saved_bytes for cost in costs)
                if room < 1:
                    return None
                in_flight = min(room, line.microbatches, place.most_in_flight)
                stages.append(Stage(place.peer, layer, end, in_flight))
                layer = end
            pipelines.append(Pipeline(tuple(stages), first, line.microbatches))
            first += line.microbatches
        used = {place.peer for line in lines for place in line.places}
        return Plan(tuple(pipelines), tuple(sorted(set(self.memory) - used)), 0)

    def step_ns(self, lines: list[Line]) -> int | None:
        plan = self.plan(lines)
        if plan is None:
            return None
        key = plan.digest()
        if key not in self._known:
            step = simulate_step(plan, self.scenario, self.workload, EXECUTION)
            self._known[key] = step.total_ns
        return self._known[key]

    def _moved(self, lines: list[Line]) -> list[Line] | None:
        """A neighbour of this plan, and now and then a neighbour's neighbour."""
        chance = self.chance
        lines = [
            Line(x.microbatches, [msgspec.structs.replace(p) for p in x.places]) for x in lines
        ]
        for _ in range(2 if chance.random() < 0.3 else 1):
            one, other = chance.choice(lines), chance.choice(lines)
            if one.places and other.places:
                move = chance.choice((self._layers, self._peers, self._count, self._shape))
                move(lines, one, other)
        return self._filled(lines)

    def _layers(self, lines: list[Line], one: Line, other: Line) -> None:
        giver, taker = self.chance.choice(one.places), self.chance.choice(one.places)
        giver.layers -= 1
        taker.layers += 1

    def _peers(self, lines: list[Line], one: Line, other: Line) -> None:
        """Two peers change places, with their layers or without."""
        here, there = (self.chance.randrange(len(line.places)) for line in (one, other))
        a, b = one.places[here], other.places[there]
        if self.chance.random() < 0.5:
            a.peer, b.peer = b.peer, a.peer
        else:
            one.places[here], other.places[there] = b, a

    def _count(self, lines: list[Line], one: Line, other: Line) -> None:
        """Change the number of microbatches, or of those in flight."""
        if one is not other and self.chance.random() < 0.6:
            one.microbatches -= 1
            other.microbatches += 1
        else:
            self.chance.choice(one.places).most_in_flight = self.chance.choice(DEPTHS)

    def _shape(self, lines: list[Line], one: Line, other: Line) -> None:
        """A peer goes elsewhere, becomes a spare, or stops being one. Pipelines part or join."""
        chance, kind = self.chance, self.chance.random()
        at = chance.randrange(len(one.places))
        if kind < 0.35:
            place = one.places.pop(at)
            other.places.insert(chance.randint(0, len(other.places)), place)
        elif kind < 0.6:
            used = {place.peer for line in lines for place in line.places}
            if spares := sorted(set(self.memory) - used):
                other.places.insert(
                    chance.randint(0, len(other.places)), Place(chance.choice(spares), 1)
                )
        elif kind < 0.8:
            one.places.pop(at)
        elif kind < 0.9:
            lines.append(Line(one.microbatches // 2, one.places[at:]))
            del one.places[at:]
        elif one is not other:
            one.places += other.places
            other.places = []

    def _filled(self, lines: list[Line]) -> list[Line] | None:
        """The pipelines with all layers in each and all microbatches of the step; None if that is
        impossible."""
        wanted, layers = self.workload.microbatch_count, self.workload.layer_count
        lines = [line for line in lines if line.places]
        if not 0 < len(lines) <= wanted or any(len(line.places) > layers for line in lines):
            return None
        for line in lines:
            line.microbatches = max(1, line.microbatches)
            for place in line.places:
                place.layers = max(1, place.layers)
            while excess := sum(place.layers for place in line.places) - layers:
                able = [place for place in line.places if excess < 0 or place.layers > 1]
                self.chance.choice(able).layers -= 1 if excess > 0 else -1
        while excess := sum(line.microbatches for line in lines) - wanted:
            several = [line for line in lines if excess < 0 or line.microbatches > 1]
            self.chance.choice(several).microbatches -= 1 if excess > 0 else -1
        return lines


def lines_of(plan: Plan) -> list[Line]:
    return [
        Line(p.microbatch_count, [Place(s.peer_id, len(s.layers)) for s in p.stages])
        for p in plan.pipelines
    ]


def row_of(name: str, moves: int) -> dict[str, Any]:
    scenario, spec = scenario_file(name), emulated_spec()
    plans = {kind: plan_named(kind, scenario, spec) for kind in ("ours", "region")}
    workload = workload_in(scenario, spec, EXECUTION)
    seconds = {
        kind: simulate_step(plan, scenario, workload, EXECUTION).total_ns / 1e9
        for kind, plan in plans.items()
    }
    found = []
    for seed in range(SEEDS):
        search = Search(scenario, spec, seed)
        start = search.random_start() if seed else lines_of(plans["ours"])
        step_ns, lines = search.best(start, moves)
        found.append((step_ns / 1e9, lines))
    best_s, lines = min(found, key=lambda each: each[0])
    return {
        "scenario": name,
        "moves": moves,
        "ours_s": round(seconds["ours"], 3),
        "region_order_s": round(seconds["region"], 3),
        "found_s": [round(each, 3) for each, _ in found],
        "region_over_ours": round(seconds["region"] / seconds["ours"], 2),
        "region_over_best": round(seconds["region"] / best_s, 2),
        "best_plan": [
            [line.microbatches, [[place.peer, place.layers] for place in line.places]]
            for line in lines
        ],
    }


def main() -> int:
    options = parse_options(__doc__, MOVES, "fewer moves, one scenario", SCENARIO_NAMES)
    names = options.scenario[:1] if options.quick else options.scenario
    rows = [row_of(name, QUICK_MOVES if options.quick else options.steps) for name in names]
    worst = max(row["ours_s"] / min(row["found_s"]) for row in rows)
    lines = (
        f"{row['scenario']:14s} ours {row['ours_s']:.3f} s, found {row['found_s']}, region order "
        f"{row['region_order_s']:.3f} s: over ours {row['region_over_ours']:.2f}, over the best "
        f"{row['region_over_best']:.2f}"
        for row in rows
    )
    figures = {"rows": rows, "ours_over_best": round(worst, 3), "target": 1.05}
    return conclude(figures, lines, "ours within 5% of the best found", worst <= 1.05, options.json)


if __name__ == "__main__":
    raise SystemExit(main())
