"""Shaped links: real daemons on one machine that live as if the world lay between them.

The sender lets bytes go no faster than the link to their receiver and its own uplink carry them;
the receiver holds what comes until the link's latency has passed since they left, and lets it in no
faster than its downlink. So nothing of a payload is copied to be delayed at the sender, and as many
bytes are under way as bandwidth and latency make, and no more. All peers of a shape are on one
machine, and their monotonic clocks are one: each piece of a stream says when it left, so that its
way through two p2pd is part of the latency, as far as that lasts. Streams and calls are
shaped; the making of connections and the directory are not, and neither loss nor slow start are
imitated. A host without a `Shaper` pays nothing.

`shaper` is what a host carries; `shape` the file that all daemons of a scenario follow; `links`,
`shaped_stream` and `fine_timer` its parts.
"""

from p2p_dtfm.net.shaping.shape import Shape, ShapedLink, ShapedPeer
from p2p_dtfm.net.shaping.shaped_stream import ShapedWriter
from p2p_dtfm.net.shaping.shaper import LineLimit, Shaper

__all__ = ["LineLimit", "Shape", "ShapedLink", "ShapedPeer", "ShapedWriter", "Shaper"]
