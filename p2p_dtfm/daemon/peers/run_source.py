"""Where a run comes from: a file of the founder, or another peer."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from p2p_dtfm.core.consensus.views.view_precedence import shows_end as ends_run
from p2p_dtfm.core.messages.agreement_messages import Standing
from p2p_dtfm.core.messages.message_bounds import require_bounded
from p2p_dtfm.core.messages.statements import require_stated, signers
from p2p_dtfm.core.protocol.canonical import decode, digest_bytes, encode
from p2p_dtfm.core.protocol.errors import UNREACHABLE, PeerFault, UserError
from p2p_dtfm.core.protocol.records import PROTOCOL_VERSION
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.core.protocol.signed import Signed, verifying_in
from p2p_dtfm.daemon.machine.before_start import data_directory
from p2p_dtfm.daemon.peers.bootstrap_node import REFUSAL as BOOTSTRAP_REFUSAL
from p2p_dtfm.daemon.peers.messenger import Messenger
from p2p_dtfm.daemon.peers.wire import Hello, Welcome, protocol_of, run_of
from p2p_dtfm.net.contacts.identity import Identity, verify
from p2p_dtfm.net.directory.values import VALUE_LIMIT_BYTES, open_run, sign_run
from p2p_dtfm.net.errors import Refused, Unreachable
from p2p_dtfm.net.shared_work import SharedWork
from p2p_dtfm.net.streams.blobs import BlobExchange, BlobUnavailable
from p2p_dtfm.ports import now
from p2p_dtfm.sim.scenario.files import read_run_spec
from p2p_dtfm.train.data import (
    DIGITS,
    STANDARD_LIBRARY,
    BlobStore,
    Manifest,
    Progress,
    Tokenizer,
    as_stated,
    load_tokenizer,
    open_prepared,
    parse_manifest,
    prepare_digits,
    prepare_standard_library,
    require_tokenizer_of,
    tokenizer_from_bytes,
)
from p2p_dtfm.train.data.prepare import TOKENIZER_NAME
from p2p_dtfm.train.model.kinds.registry import with_sizes

MANIFEST_LIMIT_BYTES = 64 << 20
WELCOME_DEADLINE_S = 10.0
SHOWERS_LIMIT, SHOWS_WITHIN_S = 8, 3.0
WELCOME_PATIENCE_S = 15.0
WELCOME_RETRY_S = 0.5

log = logging.getLogger("p2p_dtfm")


@dataclass(frozen=True)
class Run:
    """A run that this daemon takes part in."""

    spec: RunSpec
    signed_spec: Signed
    manifest: Manifest
    tokenizer: Tokenizer
    blobs: BlobStore

    @property
    def digest(self) -> str:
        return digest_bytes(self.signed_spec.payload)


def prepare_run(path: Path, scratch: Path, progress: Progress) -> tuple[RunSpec, BlobStore]:
    """Read the run spec and prepare its data; the spec then names the data by digest."""
    spec = with_sizes(read_run_spec(path))
    if spec.data.source == STANDARD_LIBRARY:
        prepared_at = scratch / "python-standard-library"
        prepare_standard_library(prepared_at, progress=progress)
    elif spec.data.source == DIGITS:
        prepared_at = scratch / DIGITS
        prepare_digits(prepared_at)
    else:
        prepared_at = data_directory(spec, path)
    prepared = open_prepared(prepared_at)
    if spec.data.manifest not in ("", prepared.manifest.digest()):
        raise UserError(
            f"{prepared_at} holds data {prepared.manifest.digest()[:12]}, but {path} names "
            f"{spec.data.manifest[:12]}",
            "remove data.manifest from the run spec, or point data.source at those data",
        )
    own = path.parent / TOKENIZER_NAME  # the model's, as `import` puts it there
    if spec.model.initial and own.is_file():
        require_tokenizer_of(own, load_tokenizer(own), spec.data.source, prepared.tokenizer)
    filled: dict[str, str | int] = {
        "manifest": prepared.manifest.digest(),
        "source": prepared.manifest.notes.name,
    }
    if spec.data.masks_documents:
        filled["end_of_document"] = prepared.tokenizer.end_of_document
    data = spec.data.model_copy(update=filled)
    return spec.model_copy(update={"data": data}), prepared.store


def sign_spec(spec: RunSpec, identity: Identity) -> Signed:
    """The spec, signed by its founder. Raises `UserError` if the directory, where members find each
    other, would not take it. Of a run by invitation the directory is told nothing."""
    signed = sign_run(spec.canonical_bytes(), identity.peer_id, identity.sign)
    size = len(encode(signed))
    if size > VALUE_LIMIT_BYTES and not spec.admission.is_invited:
        raise UserError(
            f"the run spec of {spec.name} comes to {size} bytes, and the directory holds at most "
            f"{VALUE_LIMIT_BYTES}: nobody could find the run's members there",
            (
                "list fewer [[layers]], options or privacy.ends",
                'or found it by invitation ([admission] mode = "invited"): it then stays out of '
                "the directory",
            ),
        )
    return signed


def is_here(memory: Signed, store: BlobStore) -> bool:
    """Whether manifest and tokenizer of a run are in `store`, so that `open_local_run` can use
    them. A damaged one is put aside, and is not here."""
    digest = RunSpec.from_canonical_bytes(memory.payload).data.manifest
    if not store.verify(digest):
        return False
    manifest = parse_manifest(store.held(digest).read_bytes(), digest)
    return store.verify(manifest.tokenizer.digest)


def open_local_run(signed: Signed, store: BlobStore) -> Run:
    """A run whose manifest and tokenizer are in `store`."""
    spec = with_sizes(RunSpec.from_canonical_bytes(signed.payload))
    manifest = parse_manifest(store.held(spec.data.manifest).read_bytes(), spec.data.manifest)
    tokenizer = tokenizer_from_bytes(store.held(manifest.tokenizer.digest).read_bytes())
    return Run(spec, signed, manifest, as_stated(tokenizer, manifest.tokenizer), store)


async def ask_welcome(
    messenger: Messenger, peer_ids: list[str], addresses: tuple[str, ...], expected_digest: str
) -> tuple[str, Welcome]:
    """Ask the initial peers which run they train. (the peer that answered, its answer)

    Raises `UserError`: exit code 5 for another run, 6 if nobody answers who speaks this protocol.
    """
    end_s = now.monotonic_s() + WELCOME_PATIENCE_S
    while True:
        try:
            return await _ask_welcome_once(messenger, peer_ids, addresses, expected_digest)
        except NobodyTrains as error:  # a peer that starts now has no run yet
            if error.for_good or now.monotonic_s() > end_s:
                raise (error.unlike or error) from None
        await asyncio.sleep(WELCOME_RETRY_S)


class NobodyTrains(UserError):
    """None of the peers that were asked said which run it trains."""

    def __init__(
        self, causes: list[str], for_good: bool, unlike: "OtherProtocol | None" = None
    ) -> None:
        self.for_good = for_good
        """Whether it is of no use to ask the same peers again."""
        self.unlike = unlike
        """What to do about one of them that trains, and speaks another protocol."""
        super().__init__(
            "no initial peer said which run it trains: " + "; ".join(causes),
            ("see that the other daemon has a run and is of this version", "try again in a minute"),
            exit_code=UNREACHABLE,
        )


async def _ask_welcome_once(
    messenger: Messenger,
    peer_ids: list[str],
    addresses: tuple[str, ...],
    expected_digest: str,
    deadline_s: float = WELCOME_DEADLINE_S,
) -> tuple[str, Welcome]:
    causes, unlike = [], None
    for_good = True
    for peer_id in peer_ids:
        if (passed_over := messenger.passed_over.get(peer_id)) is not None:
            causes.append(f"{peer_id}: {passed_over.cause}")
            unlike = passed_over.to_keep() if isinstance(passed_over, OtherProtocol) else unlike
            continue
        try:
            hello = Hello(PROTOCOL_VERSION, addresses)
            reply = await messenger.ask(peer_id, hello, deadline_s)
            if (version := protocol_of(reply)) != PROTOCOL_VERSION:
                _require_same_run(peer_id, reply, expected_digest)
                raise OtherProtocol(peer_id, version)
            welcome = decode(reply, Welcome)
            _check_run(peer_id, welcome, expected_digest)
            return peer_id, welcome
        except OtherProtocol as error:  # another may be of this version
            causes.append(error.cause)
            unlike = error
            messenger.pass_over(peer_id, error)
        except (Unreachable, Refused, PeerFault) as error:
            causes.append(f"{peer_id}: {error.cause}")
            for_good = for_good and BOOTSTRAP_REFUSAL in error.cause
    raise NobodyTrains(causes, for_good, unlike)


class OtherProtocol(UserError):
    """The peer that was asked may well train the wanted run, and is of another version. Once the
    older one of the two is updated, the same line works."""

    def __init__(self, peer_id: str, version: int) -> None:
        older = "this program" if version > PROTOCOL_VERSION else "the other daemon"
        super().__init__(
            f"{peer_id} speaks protocol {version}, this program {PROTOCOL_VERSION}",
            f"update {older}, which is older: pipx install --force FILE.whl",
            exit_code=UNREACHABLE,
        )


class AnotherRun(UserError):
    """The peer that was asked trains another run than the wanted one."""

    def __init__(self, peer_id: str, digest: str, wanted: str) -> None:
        super().__init__(
            f"the swarm of {peer_id} trains run {digest[:16]}, not {wanted[:16]}",
            (
                "ask whoever invited you for the address of the right swarm",
                "leave out --run-digest to take part in this run",
            ),
            exit_code=5,
        )


async def ask_welcome_shortly(
    messenger: Messenger,
    peer_id: str,
    addresses: tuple[str, ...],
    run_digest: str,
    deadline_s: float,
) -> tuple[str, Welcome] | None:
    """The answer of a peer that may not be there at all; None without one. A peer of another
    version is passed over. Raises `AnotherRun`."""
    try:
        return await _ask_welcome_once(messenger, [peer_id], addresses, run_digest, deadline_s)
    except AnotherRun:
        raise
    except UserError:
        return None


def _check_run(peer_id: str, welcome: Welcome, expected_digest: str) -> None:
    digest = digest_bytes(welcome.run_spec.payload)
    open_run(welcome.run_spec, digest)
    if expected_digest and not digest.startswith(expected_digest):
        raise AnotherRun(peer_id, digest, expected_digest)


def _require_same_run(peer_id: str, reply: bytes, expected_digest: str) -> None:
    """Raises `AnotherRun` if an answer of another version can be read so far and names another run.
    The peer proves nothing, and need not: one that wants to be passed over can say anything."""
    digest = run_of(reply)
    if digest and not digest.startswith(expected_digest):
        raise AnotherRun(peer_id, digest, expected_digest)


def fault_of_end(peer_id: str, welcome: Welcome, spec: RunSpec) -> UserError | None:
    """Why nobody joins through a peer that says that the run is complete; None if it does not. It
    may say so falsely."""
    if welcome.step <= spec.total_steps:
        return None
    run = digest_bytes(welcome.run_spec.payload)[:16]
    if shows_end(peer_id, welcome.standing, spec):
        return RunComplete(run, spec.total_steps)
    return UserError(
        f"{peer_id} says that run {run} is complete, and does not show it",
        ("join through another peer", "try again in a minute"),
        exit_code=5,
    )


async def require_joinable(
    messenger: Messenger, peer_id: str, welcome: Welcome, spec: RunSpec
) -> None:
    """Raises `UserError` where nobody joins through this peer. One that became a member after the
    last step cannot show the end, so the members that it names are asked."""
    fault = fault_of_end(peer_id, welcome, spec)
    if fault is None:
        return
    others = [it for it in welcome.peers if it.peer_id != peer_id][:SHOWERS_LIMIT]
    if not isinstance(fault, RunComplete) and others:
        messenger.learn_named(others)
        run_digest = digest_bytes(welcome.run_spec.payload)
        asked = (
            ask_welcome_shortly(messenger, it.peer_id, (), run_digest, SHOWS_WITHIN_S)
            for it in others
        )
        for answer in await asyncio.gather(*asked, return_exceptions=True):
            if isinstance(answer, tuple):
                found = fault_of_end(*answer, spec)
                fault = found if isinstance(found, RunComplete) else fault
    raise fault


class RunComplete(UserError):
    """The run is complete, as its stage-holders have signed."""

    def __init__(
        self,
        run: str,
        total_steps: int,
        fixes: tuple[str, ...] = ("found a new run, or ask a member for the model",),
    ) -> None:
        self.run, self.total_steps = run, total_steps
        super().__init__(
            f"run {run} is complete: all {total_steps:,} steps are done", fixes, exit_code=5
        )


def shows_end(peer_id: str, standing: Standing | None, spec: RunSpec) -> bool:
    """Whether a peer shows the end of this run. All members of its view have signed that view, and
    the Prepared that it has are signed for the last step."""
    if standing is None or standing.sender.peer_id != peer_id:
        return False
    if standing.run_digest != spec.digest():
        return False
    is_signed = verifying_in(spec.digest(), verify)
    try:
        require_bounded(standing, peer_id)
        require_stated(standing, is_signed)
    except PeerFault:
        return False
    members = set(standing.members)
    if standing.sender not in members or not members <= signers(standing.certificate, is_signed):
        return False
    return ends_run(standing, spec.total_steps, is_signed)


async def fetch_run(
    welcome: Welcome, store: BlobStore, exchange: BlobExchange, peers: list[str]
) -> Run:
    """Get manifest and tokenizer from peers. Raises `UserError` if none of them has both."""
    try:
        # kinds are looked up, and sizes compared, before anything is fetched
        spec = with_sizes(RunSpec.from_canonical_bytes(welcome.run_spec.payload))
        manifest_path = await _sound_blob(
            store, exchange, spec.data.manifest, peers, MANIFEST_LIMIT_BYTES
        )
        payload = await asyncio.to_thread(manifest_path.read_bytes)
        manifest = parse_manifest(payload, spec.data.manifest)
        size_bytes = manifest.blobs()[manifest.tokenizer.digest]
        path = await _sound_blob(store, exchange, manifest.tokenizer.digest, peers, size_bytes)
        tokenizer = tokenizer_from_bytes(await asyncio.to_thread(path.read_bytes))
    except (BlobUnavailable, PeerFault) as error:
        raise UserError(
            f"the run cannot be learnt from {', '.join(peers)}: {error}",
            ("try again in a minute", "join through another peer"),
            exit_code=UNREACHABLE,
        ) from error
    tokenizer = as_stated(tokenizer, manifest.tokenizer)
    return Run(spec, welcome.run_spec, manifest, tokenizer, store)


async def _sound_blob(
    store: BlobStore, exchange: BlobExchange, digest: str, peers: list[str], max_bytes: int
) -> Path:
    """As `fetch_blob`. A blob that is damaged here, or cannot be read, is fetched again."""
    if await asyncio.to_thread(store.verify, digest):
        return store.held(digest)
    return await exchange.fetch(digest, peers, store.root / digest, max_bytes)


async def fetch_blob(
    store: BlobStore, exchange: BlobExchange, digest: str, peers: list[str], max_bytes: int
) -> Path:
    """The path of a blob, fetched from peers if it is not here. Raises `BlobUnavailable`."""
    path = store.path(digest)
    if path is not None:
        return path
    return await exchange.fetch(digest, peers, store.root / digest, max_bytes)


class SharedFetches:
    """Fetches a run's files while it trains, each only once at a time."""

    def __init__(
        self, store: BlobStore, exchange: BlobExchange, donors: Callable[[], list[str]]
    ) -> None:
        self._store = store
        self._exchange = exchange
        self._donors = donors
        self._fetches = SharedWork[Path]()
        self.close = self._fetches.close

    async def have(self, digest: str, max_bytes: int) -> None:
        """Fetch a file that is not here. Raises `BlobUnavailable`, and `OSError` for a disk that
        does not take it."""
        await self._fetches.result(
            digest,
            lambda: fetch_blob(self._store, self._exchange, digest, self._donors(), max_bytes),
        )

    async def replace(self, digest: str, max_bytes: int) -> None:
        """Fetch a file again, since the one here is of no use. Raises as `have`."""
        path = self._store.root / digest
        await self._fetches.result(
            digest, lambda: self._exchange.fetch(digest, self._donors(), path, max_bytes)
        )
