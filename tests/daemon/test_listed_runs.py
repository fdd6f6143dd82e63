"""A run from the network whose layers are listed: what a machine does before it takes part."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from p2p_dtfm.core.protocol.canonical import decode, digest_bytes, encode
from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.core.protocol.records import PROTOCOL_VERSION
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.core.protocol.signed import Signed
from p2p_dtfm.daemon.peers.facts.swarm_seen import Onlooker, see
from p2p_dtfm.daemon.peers.run_source import fetch_run, prepare_run, sign_spec
from p2p_dtfm.daemon.peers.wire import Welcome
from p2p_dtfm.net.contacts.identity import Identity
from p2p_dtfm.net.directory.validator import DirectoryValidator
from p2p_dtfm.net.directory.values import key_bytes, run_key, sign_run
from p2p_dtfm.net.hivemind_parts import get_dht_time
from p2p_dtfm.net.streams.blobs import BlobExchange
from p2p_dtfm.sim.scenario.files import find_run_spec, read_run_spec
from p2p_dtfm.train.data import STANDARD_LIBRARY, BlobStore, prepare
from p2p_dtfm.train.model.kinds.registry import with_sizes
from tests.documentation.error_messages import heading_of

SOMEBODY = "12D3KooWRbpEJ767DUrmMgm1PApxQQP6RGu8ZLY4XCYqd54AiwbL"


class NothingIsFetched:
    """Stands for the part that asks peers for files."""

    async def fetch(self, *arguments: object) -> Path:
        raise AssertionError(f"fetched {arguments}")


def refused(payload: bytes, directory: Path) -> UserError:
    welcome = Welcome(PROTOCOL_VERSION, Signed("founder", "run", payload, b""), (), 0)
    exchange = cast(BlobExchange, NothingIsFetched())
    with pytest.raises(UserError) as error:
        asyncio.run(fetch_run(welcome, BlobStore(directory), exchange, ["founder"]))
    return error.value


def values_of(name: str) -> dict:
    return with_sizes(read_run_spec(name)).model_dump(mode="json")


def changed(place: int, **keys: object) -> bytes:
    """The packaged run, with other values in one of its tables."""
    values = values_of("mixed-width")
    values["layers"][place] |= keys
    return RunSpec.model_validate(values).canonical_bytes()


def test_an_unknown_kind_is_refused_before_anything_is_fetched(tmp_path: Path) -> None:
    error = refused(changed(1, kind="unheard-of"), tmp_path)
    assert "'unheard-of', and no such kind is installed here" in error.cause
    assert "block" in " ".join(error.fixes)


def test_sizes_that_are_not_the_kinds_are_refused(tmp_path: Path) -> None:
    sizes = values_of("mixed-width")["layers"][1]["sizes"] | {"parameters": 1 << 39}
    assert "is said to come to" in refused(changed(1, sizes=sizes), tmp_path).cause


def test_options_of_a_monster_are_refused(tmp_path: Path) -> None:
    assert "whole number" in refused(changed(2, options={"width": 1 << 40}), tmp_path).cause
    values = decode(changed(2), dict[str, Any], limit_bytes=1 << 16)
    values["layers"][2]["kind"] = "block" * 100
    assert "does not validate" in refused(encode(values), tmp_path).cause


def of_many_layers(**admission: object) -> RunSpec:
    values = values_of("mixed-width")
    layers = values["layers"]
    values["layers"] = [*layers[:1], *layers[1:2] * 30, *layers[1:]]
    values["model"]["layers"] += 30
    values["admission"] |= admission
    return with_sizes(RunSpec.model_validate(values))


def test_a_run_that_the_directory_would_not_take_is_not_founded(tmp_path: Path) -> None:
    own = Identity.load_or_create(tmp_path / "own")
    large = of_many_layers()
    with pytest.raises(UserError) as caught:
        sign_spec(large, own)
    assert heading_of(caught.value.cause), caught.value.cause
    key, when_s = key_bytes(run_key(large.digest())), get_dht_time() + 60
    signed = sign_run(large.canonical_bytes(), own.peer_id, own.sign)
    assert DirectoryValidator.refusal(key, None, encode(signed), when_s), "nor would a node"
    small = sign_spec(read_run_spec("tiny"), own)
    key = key_bytes(run_key(digest_bytes(small.payload)))
    assert DirectoryValidator.refusal(key, None, encode(small), when_s) is None
    invited = of_many_layers(mode="invited", founder="ab" * 32, key="cd" * 32)
    assert sign_spec(invited, own).payload == invited.canonical_bytes(), "kept out of it"


class EmptyDirectory:
    """A directory that knows no run, nor any peer."""

    async def fetch_run(self, run_digest: str) -> None:
        return None

    async def present_peers(self, run_digest: str) -> list[object]:
        return []

    async def present_at(self, peers: list[str], run_digest: str) -> list[object]:
        return []

    async def facts_of(self, run_digest: str, peers: list[str]) -> dict[str, object]:
        return {}


class Asked:
    """A member that tells its run to every peer that asks."""

    def __init__(self, spec: RunSpec) -> None:
        payload = spec.canonical_bytes()
        self.welcome = Welcome(PROTOCOL_VERSION, Signed("founder", "run", payload, b""), (), 0)

    async def call(self, peer_id: str, message: bytes, deadline_s: float) -> bytes:
        return encode(self.welcome)


def test_an_onlooker_has_the_run_from_the_peer_that_it_asks() -> None:
    large, at = of_many_layers(), f"/ip4/127.0.0.1/tcp/1/p2p/{SOMEBODY}"
    onlooker = SimpleNamespace(host=None, control=Asked(large), directory=EmptyDirectory())
    seen = asyncio.run(see(cast(Onlooker, onlooker), [at]))
    assert seen.run_digest == large.digest() and seen.spec == large
    with pytest.raises(UserError, match="the directory knows no run"):
        asyncio.run(see(cast(Onlooker, onlooker), [at], "ab" * 32))


def test_a_founder_finds_its_data_in_its_own_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`source = "~/my-data"` was found before the start, and then sought beside the run spec."""
    monkeypatch.setenv("HOME", str(tmp_path / "somebody"))
    text, path = tmp_path / "text", tmp_path / "specs" / "run.toml"
    text.write_text("words of somebody " * 200)
    path.parent.mkdir()
    made = prepare([text], tmp_path / "somebody" / "my-data", context=48)
    told = find_run_spec("tiny").read_text().replace(f'"{STANDARD_LIBRARY}"', '"~/my-data"')
    path.write_text(told)
    spec, _ = prepare_run(path, tmp_path / "scratch", lambda *told: None)
    assert spec.data.manifest == made.digest()


def test_a_founder_states_the_sizes_and_reads_the_pictures(tmp_path: Path) -> None:
    spec, store = prepare_run(find_run_spec("digits"), tmp_path, lambda *told: None)
    assert all(layer.sizes is not None for layer in spec.layers)
    assert spec.data.source == "digits"
    assert store.has(spec.data.manifest)
    again, _ = prepare_run(find_run_spec("digits"), tmp_path, lambda *told: None)
    assert again.digest() == spec.digest()
