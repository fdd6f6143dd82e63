"""Which peers of a scenario are worth their price: tokens for a dollar instead of for a second.

Peers that are alike in everything form a kind. The kinds are sorted by price for what they compute,
the cheapest first. Planned are the first kind, the first two, and so on, then each kind alone,
since a peer that computes cheaply may have a thin line. From the best of these swarms on, the
search leaves out each kind, and half of each, as long as that makes a better swarm. A plan's price
is that of the peers with a stage; spares go home.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from p2p_dtfm.core.planner.planner import compute_plan
from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.core.protocol.plan import NoPlan, Plan
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.sim.advice.progress import Progress
from p2p_dtfm.sim.scenario.execution import AS_RUN
from p2p_dtfm.sim.scenario.scenario import Scenario, ScenarioPeer
from p2p_dtfm.sim.scenario.scenario_snapshot import flops_of, scenario_snapshot

MOST_KINDS = 12
"""The most kinds of peers. Where there are more, neighbours in price are joined."""
NEARLY = 0.02
"""The part of its tokens for a dollar by which a faster swarm may fall short and still count as
cheap. One peer alone waits for nobody, and would always be the cheapest."""
PLANS_FOR_A_KIND = 4
"""The most plans for each kind, on average: with the first kinds, alone, and twice left out or
halved."""
MICRO = 1_000_000
HOUR_S = 3600


@dataclass(frozen=True, slots=True)
class Hired:
    """A swarm with its plan, and its predicted speed and price."""

    scenario: Scenario
    """The peers with a stage, in the file's order."""
    plan: Plan
    tokens_per_s: float
    price_per_hour: float

    @property
    def tokens_per_dollar(self) -> float:
        """Tokens for a dollar. A swarm that costs nothing is taken to cost a millionth of a
        dollar."""
        return self.tokens_per_s * HOUR_S / max(self.price_per_hour, 1 / MICRO)


def price_per_hour(scenario: Scenario, plan: Plan) -> float:
    """The price of the peers with a stage."""
    prices = (scenario.peer(name).price_micro_per_hour for name in plan.stage_holders())
    return sum(prices) / MICRO


def hire(
    scenario: Scenario, spec: RunSpec, progress: Progress = lambda done, most: None
) -> tuple[Hired, Hired]:
    """(most tokens for a dollar, the fastest of what was planned). Raises `UserError` where no peer
    has a price, or no plan is found."""
    if not any(peer.price_micro_per_hour for peer in scenario.peers):
        raise UserError(
            f"{scenario.name} states no price_per_hour, so its peers cost nothing",
            "give its groups a price_per_hour, in dollars for each peer",
        )
    kinds = _kinds(scenario)
    search = _HiringSearch(scenario, spec, PLANS_FOR_A_KIND * len(kinds), progress)
    for names in _begun(kinds):
        search.consider(names)
    if not search.found:
        raise UserError(
            f"{scenario.name}: no plan with any of its peers", "add peers or memory, or train less"
        )
    best = _cheapest(search.found)
    while True:
        for names in _smaller(best.scenario, kinds):
            search.consider(names)
        rival = _cheapest(search.found)
        if rival is best:
            return best, max(search.found, key=lambda each: each.tokens_per_s)
        best = rival


class _HiringSearch:
    """Plans each swarm once, as long as there is work left."""

    def __init__(self, scenario: Scenario, spec: RunSpec, most: int, progress: Progress) -> None:
        self.scenario = scenario
        self.spec = spec
        self.most = most
        self.progress = progress
        self.found: list[Hired] = []
        self._tried: set[frozenset[str]] = set()

    def consider(self, names: frozenset[str]) -> None:
        if not names or names in self._tried or len(self._tried) >= self.most:
            return
        self._tried.add(names)
        ordered = tuple(peer.name for peer in self.scenario.peers if peer.name in names)
        hired = planned_hire(self.scenario.with_peers(ordered), self.spec)
        self.found.extend([hired] if hired else [])
        self.progress(len(self._tried), self.most)


def _cheapest(found: list[Hired]) -> Hired:
    """The fastest of those that make nearly as many tokens for a dollar as any."""
    most = max(each.tokens_per_dollar for each in found)
    cheap = [each for each in found if each.tokens_per_dollar >= (1 - NEARLY) * most]
    return max(cheap, key=lambda each: each.tokens_per_s)


def planned_hire(scenario: Scenario, spec: RunSpec) -> Hired | None:
    """The scenario's plan, with the peers that have a stage in it; None where there is no plan."""
    plan = compute_plan(scenario_snapshot(scenario, spec, AS_RUN))
    if isinstance(plan, NoPlan):
        return None
    tokens_per_s = spec.tokens_per_s(plan.predicted_step_ns)
    used = set(plan.stage_holders())
    kept = scenario.with_peers(tuple(p.name for p in scenario.peers if p.name in used))
    return Hired(kept, plan, tokens_per_s, price_per_hour(scenario, plan))


def _kinds(scenario: Scenario) -> list[list[str]]:
    """Names of peers that are alike, kind by kind, the cheapest for their speed first."""
    alike: dict[ScenarioPeer, list[str]] = {}
    for peer in scenario.peers:
        alike.setdefault(replace(peer, name=""), []).append(peer.name)
    ordered = sorted(
        alike.items(), key=lambda item: (item[0].price_micro_per_hour / flops_of(item[0]), item[1])
    )
    kinds = [names for _, names in ordered]
    while len(kinds) > MOST_KINDS:
        at = min(range(len(kinds) - 1), key=lambda n: (len(kinds[n]) + len(kinds[n + 1]), n))
        kinds[at : at + 2] = [kinds[at] + kinds[at + 1]]
    return kinds


def _begun(kinds: list[list[str]]) -> Iterator[frozenset[str]]:
    """All kinds, then one less at a time, the dearest first; then each alone."""
    for count in range(len(kinds), 0, -1):
        yield frozenset(name for kind in kinds[:count] for name in kind)
    for kind in kinds:
        yield frozenset(kind)


def _smaller(hired: Scenario, kinds: list[list[str]]) -> Iterator[frozenset[str]]:
    """The swarm without each kind, and without half of it, the dearest first."""
    names = frozenset(peer.name for peer in hired.peers)
    for kind in reversed(kinds):
        there = [name for name in kind if name in names]
        if there:
            yield names - frozenset(there)
            yield names - frozenset(there[len(there) // 2 :])
