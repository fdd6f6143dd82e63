"""A run from the network whose layers are listed: what a machine does before it takes part."""

import asyncio
from pathlib import Path
from typing import cast

import pytest

from p2p_dtfm.core.protocol.canonical import decode, encode
from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.core.protocol.records import PROTOCOL_VERSION
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.core.protocol.signed import Signed
from p2p_dtfm.daemon.peers.run_source import fetch_run, prepare_run
from p2p_dtfm.daemon.peers.wire import Welcome
from p2p_dtfm.net.streams.blobs import BlobExchange
from p2p_dtfm.sim.scenario.files import find_run_spec, read_run_spec
from p2p_dtfm.train.data import BlobStore
from p2p_dtfm.train.model.kinds.registry import with_sizes


class NothingIsFetched:
    """In place of what asks peers for files."""

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
    """The run that comes along, with something else in one of its tables."""
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
    values = decode(changed(2), dict, limit_bytes=1 << 16)
    values["layers"][2]["kind"] = "block" * 100
    assert "does not validate" in refused(encode(values), tmp_path).cause


def test_a_founder_states_the_sizes_and_reads_the_pictures(tmp_path: Path) -> None:
    spec, store = prepare_run(find_run_spec("digits"), tmp_path, lambda *told: None)
    assert all(layer.sizes is not None for layer in spec.layers)
    assert spec.data.source == "digits"
    assert store.has(spec.data.manifest)
    again, _ = prepare_run(find_run_spec("digits"), tmp_path, lambda *told: None)
    assert again.digest() == spec.digest()
