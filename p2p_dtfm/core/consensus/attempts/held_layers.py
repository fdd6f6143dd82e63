"""Who holds what, as a snapshot says it."""

from p2p_dtfm.core.messages.agreement_messages import Contribution
from p2p_dtfm.core.protocol.snapshot import HeldLayer
from p2p_dtfm.core.recovery.restart_point import Recovery


def held_layers(parts: list[Contribution]) -> tuple[HeldLayer, ...]:
    """What contributors had when they entered Gather."""
    return tuple(
        HeldLayer(part.member.peer_id, layer, version)
        for part in parts
        for layer, version in sorted(part.held.items())
    )


def held_at_target(recovery: Recovery) -> tuple[HeldLayer, ...]:
    """What they have where a view starts after a failure."""
    assert recovery.target is not None
    return tuple(
        HeldLayer(member.peer_id, layer, recovery.target.step)
        for member, layers in sorted(recovery.held.items())
        for layer in layers
    )
