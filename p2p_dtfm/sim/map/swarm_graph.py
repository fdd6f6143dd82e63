"""A swarm as a graph, in a file for other programs.

networkx decides nothing that reaches a plan: two versions of it may order equals differently.
"""

from typing import Any

import networkx

from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.protocol.snapshot import Snapshot

Graph = Any
"""A networkx graph; the library has no annotations."""


def swarm_graph(snapshot: Snapshot, plan: Plan | None) -> Graph:
    """Members as nodes with their places, measured links as directed edges."""
    graph = networkx.DiGraph(name=snapshot.run_digest[:16], view=snapshot.number)
    for record in snapshot.records:
        places = plan.places_of(record.peer_id) if plan is not None else ()
        facts: dict[str, Any] = {
            "device": _seen(record.device.name),
            "memory_bytes": record.device.memory_bytes,
            "block_forward_ns": record.device.block.forward_ns,
            "uplink_bytes_per_s": record.uplink_bytes_per_s,
            "downlink_bytes_per_s": record.downlink_bytes_per_s,
            "spare": not places,
        }
        if plan is not None and places:
            number, position = places[0]
            stage = plan.pipelines[number].stages[position]
            facts |= {
                "pipeline": number + 1,
                "stage": position + 1,
                "first_layer": stage.first_layer,
                "end_layer": stage.end_layer,
            }
        graph.add_node(record.peer_id, **facts)
    for record in snapshot.records:
        for peer_id in graph:
            link = record.link_to(peer_id)
            if link is not None:
                graph.add_edge(
                    record.peer_id,
                    peer_id,
                    round_trip_ms=link.round_trip_ns / 1e6,
                    mbit_per_s=link.bytes_per_s * 8 / 1e6,
                )
    return graph


def _seen(text: str) -> str:
    """The text without control characters, which XML cannot write. A peer's owner chose it."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def graphml(graph: Graph) -> str:
    """The graph as text that Gephi, yEd, Cytoscape and networkx read."""
    return "\n".join(networkx.generate_graphml(graph)) + "\n"
