"""The parts that a trainer works with, where there is no other peer."""

import asyncio
from collections.abc import Collection
from pathlib import Path
from typing import Any

import msgspec

from p2p_dtfm.core.messages.agreement_messages import SavedState
from p2p_dtfm.core.messages.prepared import StepOutcome
from p2p_dtfm.core.messages.stage_progress import StageProgress
from p2p_dtfm.core.protocol.signed import Signed
from p2p_dtfm.core.protocol.snapshot import ViewId
from p2p_dtfm.core.protocol.workload import workload_of
from p2p_dtfm.core.recovery.view import View
from p2p_dtfm.daemon.machine.compute import Compute
from p2p_dtfm.daemon.state_transfer.checkpoints.checkpoints import Checkpoints
from p2p_dtfm.daemon.state_transfer.donor import Donor
from p2p_dtfm.daemon.state_transfer.initial_states import InitialStates
from p2p_dtfm.daemon.state_transfer.offers import Offers
from p2p_dtfm.daemon.state_transfer.state_tools import StateStores, TowardsOthers
from p2p_dtfm.daemon.telemetry.status import Status
from p2p_dtfm.daemon.trainer.trainer_state import Outlet, Tools
from p2p_dtfm.net.errors import Unreachable
from p2p_dtfm.train.data import BlobStore, Dataset, prepare
from p2p_dtfm.train.stage.batches import Batches
from tests.core.builders import run_spec
from tests.core.planning import Peer, name_of, snapshot
from tests.e2e.test_parity import even_plan

ME = name_of(0)
SPEC = run_spec()
NO_BLOBS: Any = None
"""Initial weights that fetch nothing: no step is saved, and weights come from the seed."""


async def settle() -> None:
    """Let every task go on that can do so without waiting."""
    for _ in range(20):
        await asyncio.sleep(0)


class DeadLine:
    """The messenger and bulk plane of a peer whose neighbours have died."""

    async def ask(self, peer_id: str, message: Any) -> None:
        raise Unreachable(peer_id, "gone")

    def tell(self, peer_id: str, message: Any) -> None:
        pass

    async def send(self, peer_id: str, lane: str, header: Any, payload: Any) -> None:
        raise Unreachable(peer_id, "gone")


class QuietOutlet(Outlet):
    """The daemon's side of a trainer. It ignores what it is told, unless a test says otherwise."""

    def say_prepared(self, signed: Signed, view: View) -> None: ...

    def committed(self, outcome: StepOutcome) -> None: ...

    async def settled(self) -> None: ...

    def states_changed(self) -> None: ...

    def set_cuts(self, cuts: tuple[SavedState, ...]) -> None: ...

    def reduced(self, step: int, layers: set[int]) -> frozenset[tuple[ViewId, int]]:
        return frozenset()

    def computed(self, step: int, progress: StageProgress | None) -> None: ...

    def skip_to(self, step: int, lineage: str) -> None: ...

    def trouble(self, peer_id: str, cause: str) -> None: ...

    def poison(self, peer_id: str, cause: str) -> None: ...

    def contradiction(self, reason: str) -> None: ...

    def lineage_at(self, step: int) -> str:
        return ""

    def vouch(self) -> ViewId | None:
        return None

    def are_all_in(self) -> bool:
        return True

    def applied(self, step: int, layers: Collection[int]) -> None: ...

    def shown_of(self, steps: int) -> int:
        return steps

    def synced(self, view: ViewId) -> None: ...

    async def fetch_shards(self, digests: set[str]) -> None: ...

    async def replace_shard(self, digest: str) -> None: ...

    def damaged_shard(self, digest: str) -> bool:
        return True


def view_of(number: int, peer_count: int) -> View:
    found = snapshot([Peer()] * peer_count, workload_of(SPEC))
    plan = even_plan([name_of(n) for n in range(peer_count)], (peer_count,), SPEC)
    return View(msgspec.structs.replace(found, number=number), plan)


def trainer_tools(
    directory: Path, me: str = ME, messenger: Any = None, blobs: Any = NO_BLOBS
) -> Tools:
    (directory / "text").write_text("the quick brown fox jumps over the lazy dog. " * 200)
    notes = {"name": "a sentence", "licence": "CC0", "source": "here"}
    manifest = prepare([directory / "text"], directory / "data", context=32, **notes)
    dataset = Dataset(manifest, BlobStore(directory / "data" / "blobs").path, 32)
    line: Any = messenger or DeadLine()
    compute, status, given = Compute(), Status(), BlobStore(directory / "given")
    saved: Any = (directory, SPEC, NO_BLOBS, compute, lambda files: None, lambda: True)
    return Tools(
        me=me,
        spec=SPEC,
        batches=Batches(dataset, SPEC),
        net=TowardsOthers(line, line, blobs, lambda payload: b""),
        stores=StateStores(
            InitialStates(SPEC, given, NO_BLOBS, compute, status, list),
            Checkpoints(*saved),
            Donor(line, line, compute, Offers(directory / "offers")),
        ),
        compute=compute,
        status=status,
    )
