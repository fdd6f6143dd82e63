"""Who may see texts: `[privacy]` of a run spec."""

from typing import Annotated

from pydantic import Field, StringConstraints

from p2p_dtfm.core.protocol.model_spec import Section

FOUNDER = "founder"
"""In a file, for whoever founds the run; founding puts its peer id there."""
MOST_NAMED = 256
PeerName = Annotated[str, StringConstraints(pattern="^(founder|[1-9A-HJ-NP-Za-km-z]{40,64})$")]


class PrivacySpec(Section):
    """Whom the first and the last stages are left to, and with them the data."""

    ends: tuple[PeerName, ...] = Field(
        default=(),
        max_length=MOST_NAMED,
        description="peer ids of those who alone may hold the embedding and the head, get the data "
        'and keep copies of those two layers; "founder" for whoever founds the run; none: anybody',
    )

    def withheld(self, peer_id: str, layer_count: int) -> frozenset[int]:
        """Of so many layers those that the run does not leave to this peer."""
        is_free = not self.ends or peer_id in self.ends
        return frozenset() if is_free else frozenset({0, layer_count - 1})

    def with_founder(self, peer_id: str) -> "PrivacySpec":
        """As a run states it: peer ids alone, each once."""
        named = (peer_id if name == FOUNDER else name for name in self.ends)
        return PrivacySpec(ends=tuple(sorted(set(named))))
