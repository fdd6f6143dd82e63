"""Which layers a peer's place in a view needs: nobody is given others, which would cost each step.

A request may be of a view that this peer hears of a moment later. It waits until then, and costs
nothing.
"""

from collections.abc import Collection

from p2p_dtfm.core.protocol.snapshot import ViewId
from p2p_dtfm.core.recovery.view import View


class KnownPlaces:
    """Places in the view in force, and in the one that is agreed to follow it."""

    def __init__(self) -> None:
        self._present: View | None = None
        self._next: View | None = None

    def agreed(self, view: View) -> None:
        """This view is to follow; one that was to do so before is not."""
        self._next = view

    def took_over(self, view: View) -> None:
        self._present, self._next = view, None

    @property
    def _known(self) -> tuple[View, ...]:
        return tuple(view for view in (self._present, self._next) if view is not None)

    def needs(self, peer_id: str, view: ViewId, layers: Collection[int]) -> bool | None:
        """Whether the peer holds or guards all these layers in `view`; None if that view is not
        known."""
        for known in self._known:
            if known.id == view:
                place = set(known.layers_of(peer_id)) | known.guarded_by(peer_id)
                return place.issuperset(layers)
        return None

    def may_come(self, view: ViewId) -> bool:
        """Whether a view that is not known may yet be agreed on."""
        return self._present is None or view.number > self._present.id.number

    def has(self, peer_id: str) -> bool:
        """Whether a view that is known has this member. A peer that is only to join may for a
        moment know of a view that this one does not."""
        return any(peer_id in known.member_ids for known in self._known)
