"""The peers that the judge of seeds with liars asks for a bar."""

import math
import re
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from p2p_dtfm.core.protocol.snapshot import ViewId
from p2p_dtfm.ports import now
from p2p_dtfm.testbed.virtual.lies.lying import Deed, Lying
from p2p_dtfm.testbed.virtual.peer import Peer
from p2p_dtfm.testbed.virtual.seeds import verdict
from p2p_dtfm.testbed.virtual.seeds.judge import Broken

FOUND_S = 10.0


@dataclass
class Told:
    """The parts of a peer that the judge asks for."""

    name: str
    barred: list[str]
    views: list[tuple[float, int, str]] = field(default_factory=list)
    """Each view: when it began, which it is, and its members."""
    takes_part: bool = True

    @property
    def daemon(self) -> "Told":
        return self

    def status_json(self) -> dict[str, Any]:
        return {"barred": [{"peer_id": it, "reason": "lies"} for it in self.barred]}

    def events(self) -> list[dict[str, Any]]:
        return [
            {"event": "view", "view": it, "snapshot": f"s{it}", "members": [*who], "at_s": at_s}
            for at_s, it, who in self.views
        ]


def judged(monkeypatch: pytest.MonkeyPatch, *peers: Told, disturbed_s: float = math.inf) -> None:
    lying = Lying({"liar": "L"}, together=False)
    monkeypatch.setattr(now, "monotonic_s", lambda: FOUND_S)
    for name in "ab":
        monkeypatch.setattr(lying, "here", lambda name=name: name)
        lying.deny(Deed(ViewId(2, "s2"), 5), 3, ["L"])
    verdict._require_bars(cast(list[Peer], list(peers)), lying, disturbed_s)


FIRST, SECOND, WITHOUT = (1.0, 1, "abL"), (2.0, 2, "aL"), (10.1, 3, "a")


def test_who_was_left_out_before_a_liar_was_found_out_need_not_have_barred_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Seed 200106: the peer was slandered and left out, and still out as the run came to its
    end."""
    judged(monkeypatch, Told("a", ["L"], [FIRST, SECOND, WITHOUT]), Told("b", [], [FIRST]))
    late = (10.05, 3, "abL")
    """The view had been agreed on already."""
    judged(monkeypatch, Told("a", ["L"], [FIRST, (11.0, 4, "a")]), Told("b", [], [FIRST, late]))


def test_who_came_back_after_the_end_bars_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seed 600415: the peer hears at the door that the run is complete."""
    views = [FIRST, SECOND, (10.1, 3, "ab")]
    judged(monkeypatch, Told("a", ["L"], views), Told("b", [], views, takes_part=False))


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (Told("a", ["L"], [FIRST, WITHOUT]), Told("b", [], [FIRST, WITHOUT])),
        (Told("a", [], [FIRST, (11.0, 4, "abL")]), Told("b", [], [])),
        (Told("a", ["L"], [FIRST]), Told("b", [], [FIRST])),
    ],
    ids=("went on without it", "nobody left it out", "nobody went on"),
)
def test_all_others_must(monkeypatch: pytest.MonkeyPatch, a: Told, b: Told) -> None:
    with pytest.raises(Broken, match=re.escape("liar was found out by most, and ")):
        judged(monkeypatch, a, b)


def test_who_barred_it_before_anything_else_happened_must_have_it_barred_for_good(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """This holds for every peer that loses power afterwards. What came of a verdict under way then
    is not asked."""
    forgot = Told("a", ["L"], [FIRST, WITHOUT]), Told("b", [], [FIRST, WITHOUT])
    with pytest.raises(Broken, match="has not barred it"):
        judged(monkeypatch, *forgot, disturbed_s=12.0)
    judged(monkeypatch, *forgot, disturbed_s=10.5)
    judged(monkeypatch, Told("a", ["L"], [FIRST]), Told("b", [], [FIRST]), disturbed_s=12.0)
