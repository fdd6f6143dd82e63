"""A scenario as an instance of the paper's placement problem."""

from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.core.protocol.facts.in_words import counted
from p2p_dtfm.core.protocol.workload import Workload
from p2p_dtfm.sim.paper.cost import PAPER_SIZES, PaperProblem, PaperSizes, paper_problem
from p2p_dtfm.sim.scenario.scenario import Scenario


def sizes_of(name: str, workload: Workload) -> PaperSizes:
    """The sizes that the paper's cost counts for a run, with the workload's tensors as they
    travel."""
    return PaperSizes(
        name,
        gradient_bytes=workload.block_count * workload.gradient_wire_bytes(workload.block),
        activation_bytes=workload.microbatch_count * workload.boundary_wire_bytes,
    )


def paper_problem_of(
    scenario: Scenario, stages: int, replicas: int, sizes: PaperSizes = PAPER_SIZES
) -> PaperProblem:
    """Peers in file order. Raises `UserError` unless stages * replicas fits.

    The paper's rates belong to pairs. An uplink or downlink bounds each link of its peer, as a
    `link_cap_mbps` does, and is not shared.
    """
    count = len(scenario.peers)
    if stages < 1 or replicas < 1 or stages * replicas != count:
        even = [s for s in range(1, count + 1) if count % s == 0]
        grid = counted(stages, "stage")
        grid += f" of {counted(replicas, 'replica')}" if replicas > 0 else ""
        raise UserError(
            f"the paper's grid uses every peer: {grid} do not make the {count} of {scenario.name}",
            f"choose --stages from {', '.join(map(str, even[:12]))}, with as many replicas as "
            "make that number, or a plan that may leave peers out",
        )
    peers = scenario.peers

    def link(a: int, b: int) -> tuple[int, int]:
        found = scenario.link(peers[a].name, peers[b].name)
        limits = (peers[a].uplink_bytes_per_s, peers[b].downlink_bytes_per_s)
        return found.latency_ns, min([found.bytes_per_s, *(limit for limit in limits if limit)])

    return paper_problem(tuple(peer.name for peer in peers), stages, link, sizes)
