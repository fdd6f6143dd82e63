"""The port through which a daemon uses the directory. `directory.Directory` is the one over the
DHT."""

from collections.abc import Sequence
from typing import Protocol

from p2p_dtfm.core.protocol.signed import Signed
from p2p_dtfm.net.directory.facts import PublishedPart
from p2p_dtfm.net.directory.values import Presence


class DirectoryPort(Protocol):
    """Hints about who is there."""

    def call_again_at(self, addresses: Sequence[str]) -> None: ...

    def seal(self, run_digest: str, key: bytes) -> None: ...

    async def publish_presence(self, presence: Presence) -> bool: ...

    async def present_peers(self, run_digest: str) -> list[Presence]: ...

    async def present_by_node(
        self, peer_ids: Sequence[str], run_digest: str
    ) -> list[list[Presence]]: ...

    @property
    def nodes(self) -> tuple[str, ...]: ...

    async def publish_facts(
        self, run_digest: str, record: Signed, place: PublishedPart | None
    ) -> bool: ...

    async def publish_run(self, run_digest: str, signed: Signed) -> bool: ...

    async def fetch_run(self, run_digest: str) -> Signed | None: ...

    async def meet_again(self) -> bool: ...

    async def meet(self, peer_ids: Sequence[str]) -> None: ...

    async def close(self) -> None: ...
