"""Retained steps and Prepared that outlines name: each is sent once to a receiver that may lack
it."""

import msgspec

from p2p_dtfm.core.consensus.agreement_state import AgreementState
from p2p_dtfm.core.messages.agreement_messages import Bodies, RetainedBody, Spread
from p2p_dtfm.core.messages.outlines import OUTLINE, open_outline, prepared_name, retained_name
from p2p_dtfm.core.protocol.signed import Signed


class StepsBeside:
    """After a failure nearly all retain the same step, and pass on the same Prepared."""

    def __init__(self, state: AgreementState) -> None:
        self._state = state

    def of(self, signed: Signed) -> tuple[Bodies, frozenset[bytes]]:
        """What an outline names of steps, and under which names."""
        if signed.kind != OUTLINE:
            return Bodies(), frozenset()
        outline = open_outline(signed, self._state.settings.verify)
        return self._state.others.bodies.beside(outline)

    def add(self, message: Spread, has: set[bytes]) -> Spread:
        """The message with what its outlines name and the receivers have not been sent; `has` grows
        by it."""
        retained, prepared = dict[RetainedBody, None](), dict[Signed, None]()
        for signed in message.contributions:
            found, names = self.of(signed)
            if names <= has:
                continue
            retained |= {it: None for it in found.retained if retained_name(it) not in has}
            prepared |= {it: None for it in found.prepared if prepared_name(it) not in has}
        has.update(map(retained_name, retained), map(prepared_name, prepared))
        if not retained and not prepared:
            return message
        bodies = msgspec.structs.replace(
            message.bodies, retained=tuple(retained), prepared=tuple(prepared)
        )
        return msgspec.structs.replace(message, bodies=bodies)
