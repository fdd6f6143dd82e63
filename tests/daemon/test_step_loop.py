"""A view that ends between two steps leaves nobody waiting for what it still owed."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from p2p_dtfm.core.ledger import Ledger
from p2p_dtfm.core.plan import Plan
from p2p_dtfm.core.step import Prepared
from p2p_dtfm.core.view import View
from p2p_dtfm.core.workload import workload_of
from p2p_dtfm.daemon.checkpoints import Checkpoints
from p2p_dtfm.daemon.compute import Compute
from p2p_dtfm.daemon.donor import Donor
from p2p_dtfm.daemon.initial_states import InitialStates
from p2p_dtfm.daemon.status import Status
from p2p_dtfm.daemon.trainer import Trainer
from p2p_dtfm.daemon.trainer_state import Tools
from p2p_dtfm.net.errors import Unreachable
from p2p_dtfm.train.batches import Batches
from p2p_dtfm.train.data import BlobStore, Dataset, prepare
from tests.core.builders import run_spec
from tests.core.planning import Peer, name_of, snapshot
from tests.e2e.test_parity import even_plan

ME = name_of(0)
SPEC = run_spec()
DEADLINE_S = 20.0
NO_BLOBS: Any = None
"""Nothing is fetched here: no step is saved, and weights come from the seed."""


class DeadLine:
    """Courier and bulk plane of a peer whose only neighbour has died."""

    def tell(self, peer_id: str, message: Any) -> None:
        pass

    async def send(self, peer_id: str, lane: str, header: Any, payload: Any) -> None:
        raise Unreachable(peer_id, "gone")


class Outlet:
    """The daemon's side. While the first shards are fetched, one view ends and the next begins."""

    def __init__(self, first: View, following: View) -> None:
        self.trainer: Trainer | None = None
        self.prepared: asyncio.Queue[Prepared] = asyncio.Queue()
        self._views = [following, first]

    def begin_next_view(self) -> None:
        view = self._views.pop()
        assert self.trainer is not None and isinstance(view.plan, Plan)
        self.trainer.view_agreed(view, False)
        self.trainer.take_over(view, 0, Ledger(view.id, view.plan, 0), None)

    async def fetch_shards(self, digests: set[str]) -> None:
        assert self.trainer is not None
        if self._views:
            self.trainer.stop_step()
            self.begin_next_view()

    def say_prepared(self, prepared: Prepared, view: View) -> None:
        self.prepared.put_nowait(prepared)

    def lineage_at(self, step: int) -> str:
        return ""

    def __getattr__(self, name: str) -> Any:
        """What else a trainer tells is of no interest here."""
        return lambda *arguments: None


def view_of(number: int, peer_count: int) -> View:
    found = snapshot([Peer()] * peer_count, workload_of(SPEC))
    plan = even_plan([name_of(n) for n in range(peer_count)], (peer_count,), SPEC)
    return View(msgspec.structs.replace(found, number=number), plan)


@pytest.fixture
def tools(tmp_path: Path) -> Tools:
    (tmp_path / "text").write_text("the quick brown fox jumps over the lazy dog. " * 200)
    notes = {"name": "a sentence", "licence": "CC0", "source": "here"}
    manifest = prepare([tmp_path / "text"], tmp_path / "data", context=32, **notes)
    dataset = Dataset(manifest, BlobStore(tmp_path / "data" / "blobs").path, 32)
    line: Any = DeadLine()
    compute, status, offers = Compute(), Status(), BlobStore(tmp_path / "offers")
    saved: Any = (tmp_path, SPEC, NO_BLOBS, compute, lambda files: None, lambda: True)
    return Tools(
        me=ME,
        spec=SPEC,
        batches=Batches(dataset, SPEC),
        courier=line,
        bulk=line,
        blobs=NO_BLOBS,
        compute=compute,
        checkpoints=Checkpoints(*saved),
        donor=Donor(line, line, compute, offers),
        initial=InitialStates(SPEC, offers, NO_BLOBS, compute, status, list),
        scratch=tmp_path,
        status=status,
    )


def test_a_step_is_not_begun_in_a_view_that_is_over(tools: Tools) -> None:
    """No computation is under way that could be stopped, and the old view's would never end."""
    torch.set_num_threads(1)

    async def run() -> None:
        with_the_dead, alone = view_of(1, 2), view_of(2, 1)
        outlet: Any = Outlet(with_the_dead, alone)
        trainer = outlet.trainer = Trainer(tools, outlet)
        outlet.begin_next_view()
        running = asyncio.create_task(trainer.run())
        try:
            async with asyncio.timeout(DEADLINE_S):
                prepared = await outlet.prepared.get()
        finally:
            running.cancel()
            await asyncio.wait({running})
            await trainer.close()
            tools.compute.close()
        assert (prepared.view, prepared.step) == (alone.id, 0)

    asyncio.run(run())
