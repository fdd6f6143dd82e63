"""Streams that were closed here while their other end does not take what was written before."""

import asyncio

from p2p_dtfm.net.libp2p.port import Writer

LOOK_S = 10.0
"""Written bytes may lie for this long, and at most twice as long, without one of them leaving."""


class EndedStreams:
    """Lets go of streams that nobody reads.

    As with asyncio, what was written when a stream is closed still leaves. But a peer may take none
    of it, and keep its connection. Then a descriptor would stay here for as long as the peer likes,
    and another for each further stream.
    """

    def __init__(self) -> None:
        self._watched: dict[Writer, tuple[asyncio.StreamWriter, int]] = {}
        """For each writer: the stream that carries it, and its bytes that had not left at the last
        look."""
        self._is_looking = False

    def watch(self, writer: Writer, raw: asyncio.StreamWriter) -> None:
        """Watch a stream from its opening on. `raw`: the stream that carries it, which may be the
        same."""
        self._watched[writer] = (raw, -1)
        self._look_later()

    def _look_later(self) -> None:
        if not self._is_looking and self._watched:
            self._is_looking = True
            asyncio.get_running_loop().call_later(LOOK_S, self._look)

    def _look(self) -> None:
        self._is_looking = False
        for writer, (raw, before_bytes) in list(self._watched.items()):
            if not writer.is_closing():
                continue
            left_bytes = raw.transport.get_write_buffer_size()
            is_stuck = left_bytes == before_bytes > 0
            if is_stuck:
                raw.transport.abort()
            if is_stuck or (raw.is_closing() and not left_bytes):
                del self._watched[writer]
            else:
                self._watched[writer] = (raw, left_bytes)
        self._look_later()
