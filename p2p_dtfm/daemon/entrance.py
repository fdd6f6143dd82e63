"""How a daemon comes to a run: it founds one, or learns of one from those who train it."""

import asyncio
import logging
from functools import partial
from pathlib import Path

from p2p_dtfm.core.canonical import digest_bytes
from p2p_dtfm.core.errors import UserError
from p2p_dtfm.daemon.discovery import ask_present, find_run
from p2p_dtfm.daemon.initial_states import store_initial
from p2p_dtfm.daemon.peer_state import PeerState
from p2p_dtfm.daemon.run_source import Run, fetch_run, found_run, open_local_run
from p2p_dtfm.daemon.run_spec_file import resolve_run_spec
from p2p_dtfm.daemon.self_record import SelfRecord
from p2p_dtfm.daemon.status import State
from p2p_dtfm.net.addresses import parse_address
from p2p_dtfm.train.data import BlobStore
from p2p_dtfm.train.emulated import EmulatedStageRunner, emulated_flops_per_s
from p2p_dtfm.train.measure import measure_device, select_device

log = logging.getLogger("p2p_dtfm")

DEFAULT_RUN = "tiny"


class Entrance(PeerState):
    """Founding, joining, and measuring what this peer can do."""

    async def _found_run(self) -> Run:
        self.status.say(State.STARTING, "prepares the data of the run")
        path = resolve_run_spec(self.settings.run or DEFAULT_RUN)
        scratch = self.home.root / "prepared"
        spec, signed, prepared = await asyncio.to_thread(
            found_run, path, self._host.identity, scratch
        )
        if await self._is_trained_already(spec.digest()):
            self._founds = False
            return await self._join_run(spec.digest())
        store = BlobStore(self.home.run_directory(spec.digest()) / "blobs")
        await asyncio.to_thread(store_initial, spec, path, store)
        for digest in prepared.digests():
            blob = prepared.path(digest)
            assert blob is not None
            stored = await asyncio.to_thread(store.put_file, blob)
            if stored != digest:
                store.remove(stored)
                raise damaged_data(blob)
        for address in self.settings.initial_peers:
            self._courier.forget(parse_address(address)[0])
        return open_local_run(signed, store)

    async def _is_trained_already(self, run_digest: str) -> bool:
        """Whether this very run has members: a founder that comes back joins them."""
        if not self.settings.initial_peers:
            return False
        own = await self._host.addresses()
        found = await ask_present(self._courier, self._directory, own, run_digest)
        return found is not None

    async def _print_invitation(self) -> None:
        run = self._run
        assert run is not None
        addresses = await self._host.addresses()
        log.info("founded run %s (%s)", run.digest[:16], run.spec.name)
        lines = ["", "others join with one of these lines:"]
        lines += [f"  p2p-dtfm --initial-peers {address}" for address in addresses]
        lines += [
            f"  p2p-dtfm --initial-peers {address} --run-digest {run.digest}"
            for address in self.settings.initial_peers
        ]
        print("\n".join(lines), flush=True)

    async def _join_run(self, run_digest: str) -> Run:
        self.status.say(State.JOINING, "asks which run is trained here")
        initial = [parse_address(address)[0] for address in self.settings.initial_peers]
        own = await self._host.addresses()
        self._welcomed_by, welcome = await find_run(
            self._courier,
            self._directory,
            initial,
            own,
            run_digest,
            lambda text: self.status.say(State.JOINING, text),
        )
        members = {self._welcomed_by, *(peer.peer_id for peer in welcome.peers)}
        for peer_id in set(initial) - members:
            self._courier.forget(peer_id)  # a bootstrap node
        for peer in welcome.peers:
            self._courier.learn(peer.peer_id, peer.addresses)
        spec_digest = digest_bytes(welcome.run_spec.payload)
        store = BlobStore(self.home.run_directory(spec_digest) / "blobs")
        peers = list(dict.fromkeys([self._welcomed_by, *self._courier.known]))
        run = await fetch_run(welcome, store, self._blobs, peers)
        if welcome.step > run.spec.total_steps:
            raise UserError(
                f"run {spec_digest[:16]} is complete: all {run.spec.total_steps} steps are done",
                "found a new run, or ask a member for the model",
                exit_code=5,
            )
        log.info("%s", run.manifest.notes.describe())
        log.info("takes part in run %s (%s)", run.digest[:16], run.spec.name)
        return run

    async def _measure(self) -> None:
        assert self._run is not None
        settings = self.settings
        self.status.say(State.MEASURING, "times the layers on this device")
        device = select_device(settings.device)
        limit = int(settings.memory_gib * (1 << 30)) or None
        emulated = emulated_flops_per_s(settings.device)
        measured = await self.compute.run(
            measure_device, self._run.spec, device, settings.compute_threads, limit, emulated
        )
        if emulated is not None:
            self.compute.stage_runner = partial(EmulatedStageRunner, measured)
        self._self_record = SelfRecord(
            self._me, self._run.digest, measured, await self._host.addresses(), self._probes
        )
        self._self_record.state_way_in(
            await self._host.addresses(), self._way_in.standing.reachability
        )
        if (shaper := self._host.shaper) is not None:
            self._self_record.state_line(shaper.uplink_bytes_per_s, shaper.downlink_bytes_per_s)
        await self._self_record.probe_all(
            [peer for peer in self._courier.known if peer != self._me.peer_id],
            self._courier,
            lambda text: self.status.say(State.MEASURING, text),
        )
        self._set_record()


def damaged_data(blob: Path) -> UserError:
    """A founder's own data are not what their manifest says."""
    return UserError(
        f"the data shard {blob} is damaged: its bytes are not those that were prepared",
        f"remove {blob.parents[1]} and make the data anew; "
        "for your own text: p2p-dtfm prepare PATH... --out DIR",
    )
