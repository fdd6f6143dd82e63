"""Which steps another peer could show to be committed."""

from types import SimpleNamespace
from typing import Any

from p2p_dtfm.daemon.node.participation.prepared_telling import PreparedTelling
from tests.core.planning import name_of
from tests.daemon.trainer_parts import view_of

ME = name_of(0)


class Told:
    """A messenger that keeps what to call once a message has been taken."""

    def __init__(self) -> None:
        self.taken: dict[int, Any] = {}
        self.step = 0

    def tell(self, peer_id: str, message: Any, when_taken: Any) -> None:
        if peer_id == name_of(1):
            self.taken[self.step] = when_taken


def telling(view: Any) -> tuple[PreparedTelling, Told, Any]:
    told = Told()
    agreement = SimpleNamespace(view=view, step=0, next_view=None)
    membership: Any = SimpleNamespace(
        agreement=agreement,
        run=SimpleNamespace(spec=SimpleNamespace(total_steps=100)),
        network=SimpleNamespace(messenger=told, me=SimpleNamespace(peer_id=ME)),
    )
    return PreparedTelling(membership), told, agreement


def test_what_nobody_has_taken_yet_only_this_peer_could_show() -> None:
    view = view_of(1, 2)
    prepared, told, agreement = telling(view)
    assert prepared.shown_of(0) == 0
    for step in (0, 1, 2):
        agreement.step = told.step = step
        prepared.say(SimpleNamespace(peer_id=ME), view)  # type: ignore[arg-type]
    assert prepared.shown_of(1) == prepared.shown_of(3) == 0, "of the first one nobody has it"
    told.taken[1]()
    assert prepared.shown_of(3) == 2, "one of a step shows that all before it are committed"
    told.taken[0]()
    assert prepared.shown_of(3) == 2
    told.taken[2]()
    assert prepared.shown_of(3) == 3


def test_a_later_view_begins_where_all_agree_that_it_does() -> None:
    view, later = view_of(1, 2), view_of(3, 2)
    prepared, told, agreement = telling(view)
    prepared.say(SimpleNamespace(peer_id=ME), view)  # type: ignore[arg-type]
    assert prepared.shown_of(1) == 0
    agreement.view = later
    assert prepared.shown_of(1) == 1
    agreement.step = told.step = 1
    prepared.say(SimpleNamespace(peer_id=ME), later)  # type: ignore[arg-type]
    assert prepared.shown_of(2) == 1
    told.taken[0]()
    assert prepared.shown_of(2) == 1, "of the view before"
    told.taken[1]()
    assert prepared.shown_of(2) == 2
