"""A scenario with peers added or taken away: `+3 london`, `-oregon-2`, `-tokyo`."""

import re
from dataclasses import replace

from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.core.protocol.facts.in_words import counted
from p2p_dtfm.sim.scenario.scenario import Scenario
from p2p_dtfm.sim.scenario.scenario_file import LARGEST_SCENARIO

_ADDED = re.compile(r"\+\s*([1-9]\d{0,8})\s+(\S+)")
_GONE = re.compile(r"-\s*(\S+)")


def what_if(scenario: Scenario, change: str) -> Scenario:
    """The scenario after one or more changes, separated by commas. Raises `UserError`."""
    for part in (part.strip() for part in change.split(",")):
        if added := _ADDED.fullmatch(part):
            scenario = _with_more(scenario, int(added[1]), added[2])
        elif gone := _GONE.fullmatch(part):
            scenario = _without(scenario, gone[1])
        else:
            raise UserError(
                f"cannot read the change {part!r}",
                'write "+3 london" for three more peers like those of group london, "-oregon-2" '
                'for one peer less, or "-tokyo" for a whole group less',
            )
    return scenario


def _with_more(scenario: Scenario, count: int, group: str) -> Scenario:
    alike = [peer for peer in scenario.peers if peer.group == group]
    if not alike:
        raise UserError(f"{scenario.name} has no group {group!r}", f"groups: {_groups(scenario)}")
    if count + len(scenario.peers) > LARGEST_SCENARIO:
        asked = counted(count, "peer")
        raise UserError(f"{asked} more would be too many", f"stay below {LARGEST_SCENARIO}")
    names = {peer.name for peer in scenario.peers}
    fresh = (f"{group}-{number}" for number in range(1, len(names) + count + 1))
    added = [name for name in fresh if name not in names][:count]
    more = tuple(replace(alike[-1], name=name) for name in added)
    return replace(scenario, peers=scenario.peers + more)


def _without(scenario: Scenario, name: str) -> Scenario:
    left = tuple(peer for peer in scenario.peers if name not in (peer.name, peer.group))
    if len(left) == len(scenario.peers):
        raise UserError(
            f"{scenario.name} has no peer or group {name!r}", f"groups: {_groups(scenario)}"
        )
    if not left:
        raise UserError(f"without {name!r} nobody is left", "take away fewer peers")
    return replace(scenario, peers=left)


def _groups(scenario: Scenario) -> str:
    return ", ".join(dict.fromkeys(peer.group for peer in scenario.peers))
