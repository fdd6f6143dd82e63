"""Shaped links: real daemons on one machine that live as if the world lay between them.

The sender lets bytes go no faster than the link to their receiver and its own uplink carry them.
The receiver holds bytes until the link's latency has passed since they left, and lets them in no
faster than its downlink. So the sender copies no payload to delay it. And as many bytes are under
way as bandwidth and latency make, and no more.

All peers of a shape are on one machine, and their monotonic clocks are one. Each piece of a stream
says when it left, so its way through two p2pd counts as part of the latency, as far as that lasts.
Streams and calls are shaped; the making of connections and the directory are not. Neither loss nor
slow start is imitated. A host without a `Shaper` pays nothing.

`shaper` is what a host carries; `shape` the file that all daemons of a scenario follow; `links`,
`shaped_stream` and `fine_timer` its parts.
"""

from p2p_dtfm.net.shaping.shape import Shape, ShapedLink, ShapedPeer
from p2p_dtfm.net.shaping.shaped_stream import ShapedWriter
from p2p_dtfm.net.shaping.shaper import LineLimit, Shaper

__all__ = ["LineLimit", "Shape", "ShapedLink", "ShapedPeer", "ShapedWriter", "Shaper"]
