"""All machines of the agreement, put together."""

from dataclasses import dataclass

from p2p_dtfm.core.consensus.agreement_state import AgreementState
from p2p_dtfm.core.consensus.parts.activity import Activity
from p2p_dtfm.core.consensus.parts.gather.flooding import Flooding
from p2p_dtfm.core.consensus.parts.gather.gather_reception import GatherReception
from p2p_dtfm.core.consensus.parts.gather.gathering import Gathering
from p2p_dtfm.core.consensus.parts.meeting import Meeting
from p2p_dtfm.core.consensus.parts.opening import Opening
from p2p_dtfm.core.consensus.parts.outsiders import Outsiders
from p2p_dtfm.core.consensus.parts.passing_on import PassingOn
from p2p_dtfm.core.consensus.parts.proofs import Proofs
from p2p_dtfm.core.consensus.parts.requests import Requests
from p2p_dtfm.core.consensus.parts.suspicion import Suspicion
from p2p_dtfm.core.consensus.parts.syncing import Syncing
from p2p_dtfm.core.consensus.parts.takeover import Takeover
from p2p_dtfm.core.consensus.parts.wide.spread_reception import SpreadReception
from p2p_dtfm.core.consensus.parts.wide.spreading import Spreading
from p2p_dtfm.core.consensus.parts.wide.telling import Telling
from p2p_dtfm.core.consensus.parts.wide.tidings_reception import TidingsReception


@dataclass(frozen=True)
class Machines:
    """Each works on the same state, and calls only machines that `machines_of` makes before it."""

    outsiders: Outsiders
    syncing: Syncing
    takeover: Takeover
    passing_on: PassingOn
    gathering: Gathering
    suspicion: Suspicion
    reception: GatherReception
    spreading: Spreading
    spread_reception: SpreadReception
    telling: Telling
    tidings_reception: TidingsReception
    activity: Activity
    meeting: Meeting
    opening: Opening
    requests: Requests


def machines_of(state: AgreementState) -> Machines:
    """For one peer."""
    outsiders, telling = Outsiders(state), Telling(state)
    syncing, takeover = Syncing(state, telling), Takeover(state, outsiders, telling)
    spreading = Spreading(state)
    gathering = Gathering(state, syncing, takeover, outsiders, Flooding(state, spreading))
    suspicion, proofs = Suspicion(state, gathering), Proofs(state, gathering)
    activity = Activity(state, takeover, gathering, proofs, outsiders)
    opening = Opening(state, gathering)
    reception = GatherReception(state, gathering, proofs, outsiders)
    return Machines(
        outsiders=outsiders,
        syncing=syncing,
        takeover=takeover,
        passing_on=PassingOn(state),
        gathering=gathering,
        suspicion=suspicion,
        reception=reception,
        spreading=spreading,
        telling=telling,
        tidings_reception=TidingsReception(state, telling, syncing, activity),
        spread_reception=SpreadReception(state, reception, gathering, spreading),
        activity=activity,
        meeting=Meeting(state, activity, outsiders, suspicion),
        opening=opening,
        requests=Requests(state, suspicion, opening, outsiders),
    )
