"""Bad input, as a user or a hostile peer gives it, ends in a clear message and loses nothing."""

import asyncio
import contextlib
import os
import re
import shutil
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from p2p_dtfm.core.messages.agreement_messages import (
    Contribution,
    Gather,
    JoinRequest,
    sign_contribution,
)
from p2p_dtfm.core.protocol.canonical import decode, encode
from p2p_dtfm.core.protocol.records import PackedRecord, PeerRecord, sign_record
from p2p_dtfm.core.protocol.signed import Sign, signing_in
from p2p_dtfm.core.protocol.snapshot import GENESIS, Member
from p2p_dtfm.daemon.peers.wire import CheckpointFiles, FollowLayers, pack, unpack
from p2p_dtfm.net.contacts.addresses import parse_address
from p2p_dtfm.net.errors import Refused
from p2p_dtfm.net.libp2p.control import ControlPlane
from p2p_dtfm.net.libp2p.host import Host
from p2p_dtfm.net.streams.bulk import BULK_VERSION, LANES, LaneHello
from p2p_dtfm.net.streams.frames import FrameHeader, FrameKind
from p2p_dtfm.testbed.local_swarm import Child, LocalSwarm
from tests.core.builders import record
from tests.documentation.screens import check_screen
from tests.e2e.helpers import (
    DEADLINE_S,
    Program,
    assert_nothing_is_left,
    errors_of,
    logged,
    run_program,
    state_of,
    step_of,
    wait_until,
    write_spec,
)
from tests.e2e.walking_daemon import MODULE

LOOPBACK = ["/ip4/127.0.0.1/tcp/0"]
OTHER_RUN = "f" * 64
OTHER_PEER = "12D3KooWEyoppNCUx8Yx66oV9fJnriXwCcXwDDUA2kj6vnc6iDEp"
TWO_TO_THE_40 = 1 << 40


# what a user types --------------------------------------------------------------------------------


@pytest.mark.parametrize("address", ["nonsense", f"/ip4/999.0.0.1/tcp/1/p2p/{OTHER_PEER}"])
def test_a_malformed_address_is_named_with_what_one_looks_like(
    address: str, tmp_path: Path, program: Program
) -> None:
    code, _, told = program("--home", tmp_path, "--initial-peers", address)
    assert code == 2
    assert address in told and "fix" in told
    if address == "nonsense":
        check_screen("A malformed address", told, tmp_path, ["--initial-peers", address])


def test_an_unreachable_address_is_named_with_what_to_look_at(tmp_path: Path) -> None:
    address = f"/ip4/127.0.0.1/tcp/1/p2p/{OTHER_PEER}"
    done = run_program("--home", tmp_path, "--listen", LOOPBACK[0], "--initial-peers", address)
    assert done.returncode == 6
    assert address in done.stderr and "fix 1" in done.stderr
    assert_nothing_is_left(tmp_path)
    typed = ["--initial-peers", address]
    check_screen("An address that nobody answers at", errors_of(done), tmp_path, typed)


def test_an_unknown_key_in_a_run_spec_is_refused_with_a_suggestion(tmp_path: Path) -> None:
    spec = write_spec(tmp_path)
    spec.write_text(spec.read_text().replace('"global_batch"', '"globalbatch"'))
    done = run_program("--home", tmp_path / "home", "--listen", LOOPBACK[0], "--run", spec)
    assert done.returncode == 2
    assert "batch.globalbatch" in done.stderr and "did you mean 'global_batch'" in done.stderr
    assert str(spec) in done.stderr
    typed = ["--run", spec]
    check_screen("A run spec with a key that there is not", errors_of(done), tmp_path, typed)


def test_an_unknown_setting_in_a_file_is_refused_with_a_suggestion(
    tmp_path: Path, program: Program
) -> None:
    config = tmp_path / "settings.toml"
    config.write_text("theads = 2\n")
    code, _, told = program("--home", tmp_path, "--config", config)
    assert code == 2
    assert "'theads'" in told and "'threads'" in told and str(config) in told
    check_screen("A setting that there is not", told, tmp_path, ["--config", config])


def test_an_unknown_setting_in_the_environment_is_refused_with_a_suggestion(
    tmp_path: Path, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("P2P_DTFM_LISTENN", "/ip4/127.0.0.1/tcp/0")
    code, _, told = program("--home", tmp_path)
    assert code == 2
    assert "'listenn'" in told and "'listen'" in told


@pytest.mark.parametrize("text", ["threads = -1", "threads = 'many'", "log = 'loud'", "= 1"])
def test_a_wrong_setting_names_its_origin(text: str, tmp_path: Path, program: Program) -> None:
    config = tmp_path / "settings.toml"
    config.write_text(text)
    code, _, told = program("--home", tmp_path, "--config", config)
    assert code == 2
    assert str(config) in told and "fix" in told
    if "many" in text:
        heading = "A setting with a value that it cannot have"
        check_screen(heading, told, tmp_path, ["--config", config])


def test_a_founder_with_damaged_data_is_told_before_anyone_joins(
    prepared_data: Path, tmp_path: Path
) -> None:
    mine = tmp_path / "prepared"
    shutil.copytree(prepared_data, mine)
    shard = largest(mine / "blobs")
    corrupt(shard)
    spec = write_spec(tmp_path, data={"source": str(mine)})
    done = run_program("--home", tmp_path / "home", "--listen", LOOPBACK[0], "--run", spec)
    assert done.returncode == 2
    assert str(shard) in done.stderr and "damaged" in done.stderr and "prepare" in done.stderr
    typed = ["--run", spec]
    check_screen("A damaged shard at the founder's", errors_of(done), tmp_path, typed)


def log_line(child: Child, text: str) -> str:
    """The first line of the child's log with that text, as its terminal shows it."""
    lines = (child.home / "stderr").read_text(errors="replace").splitlines()
    return next(line for line in lines if text in line)


def largest(directory: Path) -> Path:
    return max((p for p in directory.iterdir() if p.is_file()), key=lambda p: p.stat().st_size)


def corrupt(path: Path) -> None:
    """Replace the file by a new one, with as many other bytes."""
    changed = bytes(byte ^ 1 for byte in path.read_bytes())
    path.unlink()
    path.write_bytes(changed)


# memory and shards in a swarm of two --------------------------------------------------------------


def test_short_memory_is_named_and_ends_when_a_peer_joins_whose_damaged_shards_are_fetched_again(
    prepared_data: Path, tmp_path: Path
) -> None:
    spec = write_spec(
        tmp_path,
        total_steps=1_000_000,
        model={"layers": 4, "width": 64, "heads": 2, "context": 32, "vocabulary": 256},
        data={"source": str(prepared_data)},
    )
    half = ["--memory-gib", "0.0035"]
    with LocalSwarm(tmp_path, ["--threads", "1"], MODULE) as swarm:
        founder, address = swarm.found(["--run", str(spec), *half])
        wait_until(lambda: state_of(founder)[0] == "waiting", "the founder waits")
        reason = state_of(founder)[1]
        assert "1 peer offers" in reason and "more memory is needed" in reason and "MiB" in reason
        check_screen("A model that does not fit into memory", f"waiting: {reason}", tmp_path)

        blobs = next(founder.home.glob("runs/*/blobs"))
        seeded = tmp_path / "peer-1" / blobs.relative_to(founder.home)
        seeded.mkdir(parents=True)
        shards = [path for path in blobs.iterdir() if path.stat().st_size >= 10_000]
        assert shards
        for shard in shards:
            shutil.copyfile(shard, seeded / shard.name)
            corrupt(seeded / shard.name)
        joiner = swarm.join(address, half)
        wait_until(lambda: step_of(founder) >= 5 and step_of(joiner) >= 5, "both train")
        check_screen("A damaged shard at another peer", log_line(joiner, "data shard"), tmp_path)
        mended = [path.name for path in (seeded / "quarantine").iterdir()]
        assert mended
        for name in mended:
            assert (seeded / name).read_bytes() == (blobs / name).read_bytes()
        for child in swarm.children:  # both: neither must wait until the other has its layers
            child.process.send_signal(signal.SIGTERM)
        for child in swarm.children:
            assert child.process.wait(DEADLINE_S) == 0, child.log_tail()
        assert not logged(founder, "Traceback") and not logged(joiner, "Traceback")


# what a hostile peer sends to a daemon that trains ------------------------------------------------


@dataclass(frozen=True)
class Live:
    founder: Child
    address: str

    @property
    def facts(self) -> dict:
        facts = self.founder.status()
        assert facts is not None, self.founder.log_tail()
        return facts

    def assert_trains_on(self) -> None:
        step = self.facts["step"]
        wait_until(lambda: self.facts["step"] > step + 1, "it trains on")
        assert not logged(self.founder, "Traceback"), self.founder.log_tail()


@pytest.fixture(scope="module")
def live(prepared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A daemon that trains alone; every test here must leave it training."""
    directory = tmp_path_factory.mktemp("live")
    spec = write_spec(
        directory,
        total_steps=1_000_000,
        evaluation={"every_steps": 10_000, "sequences": 4},
        checkpoint={"every_steps": 10_000},
        data={"source": str(prepared_data)},
    )
    with LocalSwarm(directory, ["--threads", "1"], MODULE) as swarm:
        founder, address = swarm.found(["--run", str(spec)])
        wait_until(lambda: (founder.status() or {}).get("step"), "it trains")
        yield Live(founder, address)
        founder.process.send_signal(signal.SIGTERM)
        assert founder.process.wait(DEADLINE_S) == 0, founder.log_tail()
    assert_nothing_is_left(directory)


@dataclass
class Stranger:
    """A peer of the test's own, connected to the daemon."""

    host: Host
    control: ControlPlane
    target: str
    heard: asyncio.Queue[bytes]

    async def call(self, message: object) -> bytes:
        return await self.control.call(self.target, pack(1, message), 10)  # type: ignore[arg-type]


@contextlib.asynccontextmanager
async def stranger(live: Live, directory: Path) -> AsyncIterator[Stranger]:
    host = await Host.start(directory / "stranger.key", LOOPBACK, initial_peers=[live.address])
    heard: asyncio.Queue[bytes] = asyncio.Queue()

    async def hear(sender: str, body: bytes) -> bytes:
        heard.put_nowait(body)
        return b""

    try:
        control = await ControlPlane(host, hear).ready()
        yield Stranger(host, control, parse_address(live.address)[0], heard)
    finally:
        await host.close()


def with_stranger(
    live: Live, directory: Path, scenario: Callable[[Stranger], Awaitable[None]]
) -> str:
    """Run a scenario with a stranger. Returns the stranger's peer id."""

    async def run() -> str:
        async with asyncio.timeout(DEADLINE_S), stranger(live, directory) as one:
            await scenario(one)
            return one.host.peer_id

    return asyncio.run(run())


def frame_of(live: Live, **changes: object) -> FrameHeader:
    """A frame that would do no harm in a view to which the stranger belongs."""
    facts = live.facts
    values: dict[str, object] = {
        "view_number": facts["view"],
        "view_digest": facts["snapshot"],
        "step": facts["step"],
        "kind": FrameKind.ACTIVATION,
        "index": 0,
        "layer": 2,
        "codec": "fp32",
        "dtype": "float32",
        "shape": (2, 32, 32),
        "payload_bytes": 2 * 32 * 32 * 4,
    }
    return FrameHeader(**(values | changes))  # type: ignore[arg-type]


async def send_raw(one: Stranger, lane: str, run_digest: str, header: FrameHeader) -> bytes:
    """Say hello on a stream and send a frame's header. Returns what the daemon says to that."""
    reader, writer = await one.host.open_stream(one.target, f"/p2p-dtfm/1/bulk/{lane}", 10)
    hello = encode(LaneHello(BULK_VERSION, run_digest, lane, session=1, stripe=0))
    body = encode(header)
    start = b"DTFM" + bytes((1, 0)) + len(body).to_bytes(2, "big")
    with contextlib.suppress(OSError):
        writer.write(len(hello).to_bytes(2, "big") + hello + start + body)
        await writer.drain()
    with contextlib.suppress(OSError):
        async with asyncio.timeout(10):
            return await reader.read()
    return b""


def test_who_has_no_place_sends_no_tensors(live: Live, tmp_path: Path) -> None:
    """Whatever the frame claims, the daemon closes the stream before it reads the hello. It judges
    what members send by its header (`tests/net/test_bulk.py`) and by what is due of them."""
    memory_bytes = resident_bytes(live.founder)
    claims = {"payload_bytes": TWO_TO_THE_40, "shape": (TWO_TO_THE_40 // 4,)}

    async def scenario(one: Stranger) -> None:
        for lane in LANES:
            for header in (frame_of(live), frame_of(live, **claims)):
                assert await send_raw(one, lane, live.facts["run_digest"], header) == b""
        assert await send_raw(one, "forward", OTHER_RUN, frame_of(live)) == b""

    with_stranger(live, tmp_path, scenario)
    assert any("lane" in str(item) for item in live.facts["refused"]), live.facts["refused"]
    assert resident_bytes(live.founder) < memory_bytes + (64 << 20)
    live.assert_trains_on()


def resident_bytes(child: Child) -> int:
    pages = int(Path(f"/proc/{child.process.pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def test_a_wrong_run_digest_names_both_runs(live: Live, tmp_path: Path) -> None:
    done = run_program(
        "--home", tmp_path, "--listen", LOOPBACK[0], "--initial-peers", live.address,
        "--run-digest", OTHER_RUN,
    )  # fmt: skip
    assert done.returncode == 5
    assert OTHER_RUN[:16] in done.stderr and live.facts["run_digest"][:16] in done.stderr
    assert "fix 1" in done.stderr
    typed = ["--initial-peers", live.address, "--run-digest", OTHER_RUN]
    check_screen("The digest of another run", errors_of(done), tmp_path, typed)
    live.assert_trains_on()


# records --------------------------------------------------------------------------------------


def sign_in(one: Stranger, run_digest: str) -> Sign:
    return signing_in(run_digest, one.host.identity.sign)


async def own_record(one: Stranger, live: Live, **changes: object) -> PeerRecord:
    addresses = await one.host.addresses()
    run_digest = live.facts["run_digest"]
    values = {"run_digest": run_digest, "addresses": addresses} | changes
    return record(one.host.peer_id, **values)  # type: ignore[arg-type]


def test_a_forged_record_is_refused_by_name(live: Live, tmp_path: Path) -> None:
    async def scenario(one: Stranger) -> None:
        sign = sign_in(one, live.facts["run_digest"])
        signed = sign_record(await own_record(one, live), sign)
        forgeries = [
            msgspec.structs.replace(signed, signature=bytes(64)),
            msgspec.structs.replace(signed, payload=signed.payload + b"\x00"),
        ]
        for forged in forgeries:
            with pytest.raises(Refused, match="forged signature"):
                await one.call(JoinRequest(forged))
        with pytest.raises(Refused, match="asks for another peer to be let in"):
            await one.call(JoinRequest(msgspec.structs.replace(signed, peer_id=OTHER_PEER)))
        other_run = await own_record(one, live, run_digest=OTHER_RUN)
        with pytest.raises(Refused, match="takes part in run"):
            await one.call(JoinRequest(sign_record(other_run, sign_in(one, OTHER_RUN))))

    with_stranger(live, tmp_path, scenario)
    live.assert_trains_on()


def test_a_contribution_of_a_stranger_alone_is_refused(live: Live, tmp_path: Path) -> None:
    async def scenario(one: Stranger) -> None:
        mine, sign = await own_record(one, live), sign_in(one, live.facts["run_digest"])
        signed = sign_record(mine, sign)
        forged = msgspec.structs.replace(signed, signature=bytes(64))
        number = live.facts["view"] // 2 * 2 + 2
        me = Member(one.host.peer_id, 1)
        contribution = Contribution(me, number, forged, None, 0, {}, ())
        said = sign_contribution(contribution, sign)
        with pytest.raises(Refused, match="not its place"):
            await one.call(Gather(me, number, True, GENESIS, 1, (said,), (), ""))

    with_stranger(live, tmp_path, scenario)
    live.assert_trains_on()


def test_a_record_with_a_lower_sequence_does_not_replace_a_newer_one(
    live: Live, tmp_path: Path
) -> None:
    async def scenario(one: Stranger) -> None:
        for sequence in (5, 3):
            sign = sign_in(one, live.facts["run_digest"])
            signed = sign_record(await own_record(one, live, sequence=sequence), sign)
            await one.call(JoinRequest(signed))
        while not isinstance(message := unpack(await one.heard.get())[1], Gather):
            pass
        (said,) = message.contributions
        assert decode(said.payload, Contribution).joiners == (Member(one.host.peer_id, 1),)
        (named,) = message.newcomers
        assert decode(named.payload, PackedRecord).sequence == 5

    sender = with_stranger(live, tmp_path, scenario)
    wait_until(lambda: logged(live.founder, f"goes on without {sender}"), "it is not waited for")
    live.assert_trains_on()


@pytest.mark.parametrize(
    "message, cause",
    [
        (FollowLayers(GENESIS, 1, {0: -1, 1: -1}, False), "not its place"),
        (b"\xc1\x00rubbish", "no message"),
        (b"\x91" * 60_000, "no message"),
        (b"", "no message"),
    ],
    ids=["unasked follower", "rubbish", "nested lists", "nothing"],
)
def test_what_no_member_says_is_refused(
    message: object, cause: str, live: Live, tmp_path: Path
) -> None:
    async def scenario(one: Stranger) -> None:
        body = message if isinstance(message, bytes) else pack(1, message)  # type: ignore[arg-type]
        with pytest.raises(Refused, match=cause):
            await one.control.call(one.target, body, 10)

    with_stranger(live, tmp_path, scenario)
    live.assert_trains_on()


def test_checkpoints_that_strangers_announce_are_not_believed(live: Live, tmp_path: Path) -> None:
    async def scenario(one: Stranger) -> None:
        for step in range(8):
            files = {layer: ("../" * 20 + "etc", 100) for layer in range(6)}
            with pytest.raises(Refused, match="not its place"):
                await one.call(CheckpointFiles((1 << 62) + step, "ab" * 32, files))

    with_stranger(live, tmp_path, scenario)
    live.assert_trains_on()


# disk -------------------------------------------------------------------------------------------


def test_a_shard_that_nobody_has_is_waited_for_in_plain_words(live: Live, tmp_path: Path) -> None:
    blobs = next(live.founder.home.glob("runs/*/blobs"))
    moved = []
    for path in list(blobs.iterdir()):
        if path.is_file() and path.stat().st_size >= 10_000:
            path.rename(tmp_path / path.name)
            moved.append(path)
    wait_until(lambda: state_of(live.founder)[0] == "waiting", "it waits")
    reason = state_of(live.founder)[1]
    assert any(path.name[:16] in reason for path in moved)
    assert "missing" in reason and "start again" in reason
    shown = re.sub(r"\(.*\); it is taken", "(CAUSE); it is taken", reason)
    check_screen("A shard that nobody has", f"waiting: {shown}", tmp_path)
    for path in moved:
        (tmp_path / path.name).rename(path)
    wait_until(lambda: state_of(live.founder)[0] == "training", "it goes on by itself")
    live.assert_trains_on()
