"""A disk that is away costs what lies there, and is no bug."""

import asyncio
import errno
from types import SimpleNamespace
from typing import Any

import pytest

from p2p_dtfm.core.protocol.canonical import encode
from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.net.streams.blobs import BlobExchange, _Request


def test_who_asks_for_what_lies_on_a_lost_disk_is_told_so() -> None:
    """Each request left a traceback in the log, and its sender heard of an internal error."""

    def is_away(digest: str) -> Any:
        raise OSError(errno.EIO, "Input/output error")

    host: Any = SimpleNamespace(shaper=None)
    exchange = BlobExchange(host, is_away)
    with pytest.raises(PeerFault, match="cannot be read here"):
        asyncio.run(exchange._serve("somebody", encode(_Request("ab" * 32, 0, 1))))
