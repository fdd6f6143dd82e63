"""Tokens for a dollar: of all peers, of those of each price, and of those that are worth their
price."""

from collections.abc import Iterator

from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.sim.advice.hiring import MICRO, Hired, hire, planned_hire
from p2p_dtfm.sim.reproduction.bars import Chart, ChartBar, FigureKind
from p2p_dtfm.sim.scenario.scenario import Scenario

PRICES_APART = 6
"""The most prices that are planned by themselves, the most common first."""
GROUPS_NAMED = 2
EVERYBODY, WORTH_IT = "everybody", "those worth their price"

PriceRow = dict[str, float]
"""{"step_s", "tokens_per_s", "price_per_hour", "tokens_per_dollar", "peers"}."""


def has_prices(scenario: Scenario) -> bool:
    return any(peer.price_micro_per_hour for peer in scenario.peers)


def swarms_by_price(scenario: Scenario) -> Iterator[tuple[str, Scenario]]:
    """All peers, and where there are several prices those of each."""
    yield EVERYBODY, scenario
    names: dict[int, list[str]] = {}
    for peer in scenario.peers:
        names.setdefault(peer.price_micro_per_hour, []).append(peer.name)
    if len(names) < 2:
        return
    for price in sorted(names, key=lambda price: -len(names[price]))[:PRICES_APART]:
        swarm = scenario.with_peers(tuple(names[price]))
        groups = list(dict.fromkeys(peer.group for peer in swarm.peers))
        more = " and others" if len(groups) > GROUPS_NAMED else ""
        yield f"{', '.join(groups[:GROUPS_NAMED])}{more} (${price / MICRO:g} an hour)", swarm


def what_if_of(scenario: Scenario, swarm: Scenario) -> str:
    """The change of `plan --what-if` that leaves these peers of a scenario; "" where all stay."""
    kept = {peer.name for peer in swarm.peers}
    groups = {peer.group for peer in swarm.peers}
    gone = [peer for peer in scenario.peers if peer.name not in kept]
    words = [f"-{peer.name if peer.group in groups else peer.group}" for peer in gone]
    return ", ".join(dict.fromkeys(words))


def price_row(scenario: Scenario, spec: RunSpec) -> PriceRow | None:
    """The row of a swarm's plan as predicted; None where the swarm has no plan."""
    hired = planned_hire(scenario, spec)
    return None if hired is None else _row(hired)


def worth_row(scenario: Scenario, spec: RunSpec) -> PriceRow:
    """The row of the peers that make most tokens for a dollar. Raises `UserError` where none
    can."""
    return _row(hire(scenario, spec)[0])


def _row(hired: Hired) -> PriceRow:
    return {
        "step_s": hired.plan.predicted_step_ns / 1e9,
        "tokens_per_s": hired.tokens_per_s,
        "price_per_hour": hired.price_per_hour,
        "tokens_per_dollar": hired.tokens_per_dollar,
        "peers": len(hired.scenario.peers),
    }


def price_bar(
    name: str, row: PriceRow, case: str, spec: RunSpec, source: str, cached: bool = False
) -> ChartBar:
    return ChartBar(
        chart=Chart.PRICES,
        case=case,
        layers=spec.model.layers,
        batch=spec.batch.global_batch,
        system=name,
        kind=FigureKind.PREDICTED,
        source=source,
        seconds=row["step_s"],
        tokens_per_dollar=row["tokens_per_dollar"],
        price_per_hour=row["price_per_hour"],
        peers=int(row["peers"]),
        cached=cached,
    )
