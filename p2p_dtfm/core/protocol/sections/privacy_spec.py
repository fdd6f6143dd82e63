"""Who may see texts: `[privacy]` of a run spec."""

from typing import Annotated

from pydantic import Field, StringConstraints

from p2p_dtfm.core.protocol.model_spec import Section

FOUNDER = "founder"
"""The word in a file for the peer that founds the run. Founding puts its peer id in its place."""
MOST_NAMED = 256
PeerName = Annotated[str, StringConstraints(pattern="^(founder|[1-9A-HJ-NP-Za-km-z]{40,64})$")]


class PrivacySpec(Section):
    """The peers to which the run leaves the first and the last stages, and with them the data."""

    ends: tuple[PeerName, ...] = Field(
        default=(),
        max_length=MOST_NAMED,
        description="peer ids of those who alone may hold the embedding and the head, get the data "
        'and keep copies of those two layers; "founder" for whoever founds the run; none: anybody',
    )

    def withheld(self, peer_id: str, layer_count: int) -> frozenset[int]:
        """The layers, of `layer_count`, that the run does not leave to this peer."""
        is_free = not self.ends or peer_id in self.ends
        return frozenset() if is_free else frozenset({0, layer_count - 1})

    def with_founder(self, peer_id: str) -> "PrivacySpec":
        """The section as a run states it: peer ids alone, each once. In a scenario, names of peers
        stand for ids."""
        named = (peer_id if name == FOUNDER else name for name in self.ends)
        return PrivacySpec.model_construct(ends=tuple(sorted(set(named))))
