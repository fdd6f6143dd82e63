"""Samples: each once a pass, from shards that are checked before they are believed."""

import errno
import os
from pathlib import Path

import numpy as np
import pytest
from data_examples import make_spec

from p2p_dtfm.core.protocol.canonical import digest_bytes
from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.train.data import (
    BlobStore,
    Dataset,
    Manifest,
    ShardDamaged,
    ShardEntry,
    ShardMissing,
    ShardUnreadable,
    blob_store,
    prepare,
    shard_files,
)
from p2p_dtfm.train.data.manifest import Notes, TokenizerEntry, Totals

CONTEXT = 16


@pytest.fixture
def store(tmp_path: Path) -> BlobStore:
    return BlobStore(tmp_path / "out" / "blobs")


@pytest.fixture
def manifest(texts: Path, tmp_path: Path) -> Manifest:
    return prepare([texts], tmp_path / "out", shard_tokens=1500, held_out_fraction=0.1)


def numbered(store: BlobStore, windows_in_shards: list[int]) -> Manifest:
    """A corpus whose every window holds its own number, as 17 tokens of uint16, and some rest."""
    shards, number = [], 0
    for windows in windows_in_shards:
        values = np.repeat(np.arange(number, number + windows), CONTEXT + 1)
        payload = np.concatenate([values, np.full(5, 60_000)]).astype("<u2").tobytes()
        shards.append(ShardEntry(store.put_bytes(payload), len(payload) // 2, "train"))
        number += windows
    held_out = np.repeat(np.arange(30), CONTEXT + 1).astype("<u2").tobytes()
    shards.append(ShardEntry(store.put_bytes(held_out), len(held_out) // 2, "held_out"))
    train_tokens = sum(shard.tokens for shard in shards[:-1])
    return Manifest(
        1,
        "uint16",
        TokenizerEntry("c" * 64, 16, 65_536),
        tuple(shards),
        Totals(train_tokens, shards[-1].tokens, 1, 1),
        Notes("", "", ""),
    )


def test_each_sample_exactly_once_a_pass(store: BlobStore) -> None:
    dataset = Dataset(numbered(store, [7, 1, 23, 0, 6]), store.path, CONTEXT)
    spec = make_spec(vocabulary=65_536, global_batch=12, microbatch=4)
    assert dataset.sample_count == 37 and dataset.held_out_count == 30
    seen = []
    for step in range(37):
        for microbatch in range(spec.microbatches_per_step):
            inputs, targets = dataset.microbatch(spec, step, microbatch)
            assert inputs.shape == targets.shape == (4, CONTEXT)
            assert (inputs == inputs[:, :1]).all() and (targets == inputs).all()
            seen += inputs[:, 0].tolist()
    for number in range(12):
        assert sorted(seen[number * 37 : (number + 1) * 37]) == list(range(37))


def test_inputs_and_targets_are_the_text(manifest: Manifest, store: BlobStore) -> None:
    dataset, spec = Dataset(manifest, store.path, CONTEXT), make_spec()
    inputs, targets = dataset.microbatch(spec, 3, 1)
    assert inputs.dtype == targets.dtype == np.int64
    assert inputs.flags.c_contiguous and inputs.flags.writeable
    assert (inputs[:, 1:] == targets[:, :-1]).all()
    train = b"".join(store.path(shard.digest).read_bytes() for shard in manifest.shards_in("train"))
    for row, last in zip(inputs, targets[:, -1:], strict=True):
        assert bytes([*row.tolist(), *last.tolist()]) in train


def test_held_out_windows_are_fixed_and_spread(store: BlobStore) -> None:
    dataset = Dataset(numbered(store, [9]), store.path, CONTEXT)
    spec = make_spec(vocabulary=65_536, microbatch=4)
    numbers = [dataset.held_out_microbatch(spec, index)[0][:, 0].tolist() for index in (0, 1)]
    assert numbers == [[0, 3, 7, 11], [15, 18, 22, 26]]
    assert dataset.held_out_shards(spec) == {
        shard.digest for shard in dataset.manifest.shards_in("held_out")
    }


def test_more_evaluation_than_text_uses_all_of_it(store: BlobStore) -> None:
    dataset = Dataset(numbered(store, [9]), store.path, CONTEXT)
    spec = make_spec(vocabulary=65_536, global_batch=64, microbatch=64)
    used = {place for index in (0, 1) for place in dataset.held_out_indices(spec, index)}
    assert used == set(range(30))


def test_only_the_shards_needed_are_opened(manifest: Manifest, store: BlobStore) -> None:
    asked: list[str] = []

    def path(digest: str) -> Path | None:
        asked.append(digest)
        return store.path(digest)

    dataset, spec = Dataset(manifest, path, CONTEXT), make_spec()
    indices = dataset.sample_indices(spec, 0, 0)
    needed = dataset.shards_of(indices)
    dataset.microbatch(spec, 0, 0)
    assert set(asked) == needed and len(asked) == len(needed)
    assert needed < {shard.digest for shard in manifest.shards}


def test_a_missing_shard_is_named_and_can_come_later(
    manifest: Manifest, store: BlobStore, tmp_path: Path
) -> None:
    here = BlobStore(tmp_path / "peer")
    dataset, spec = Dataset(manifest, here.path, CONTEXT), make_spec()
    needed = dataset.shards_of(dataset.sample_indices(spec, 0, 0))
    for _ in range(len(needed)):
        with pytest.raises(ShardMissing) as caught:
            dataset.microbatch(spec, 0, 0)
        here.put_file(store.path(caught.value.digest))
    whole = Dataset(manifest, store.path, CONTEXT).microbatch(spec, 0, 0)
    assert np.array_equal(dataset.microbatch(spec, 0, 0), whole)


@pytest.mark.parametrize("damage", ["flip", "truncate", "grow", "empty"])
def test_a_damaged_shard(manifest: Manifest, store: BlobStore, damage: str) -> None:
    for shard in manifest.shards_in("train"):
        path = store.path(shard.digest)
        content = bytearray(path.read_bytes())
        if damage == "flip":
            content[len(content) // 2] ^= 1
        elif damage == "truncate":
            del content[-1]
        elif damage == "grow":
            content.append(0)
        else:
            content.clear()
        path.write_bytes(content)
    with pytest.raises(ShardDamaged, match="data shard") as caught:
        Dataset(manifest, store.path, CONTEXT).microbatch(make_spec(), 0, 0)
    assert "it will be fetched again" in caught.value.fixes[0]
    assert str(store.root) in caught.value.fixes[0]
    store.quarantine(caught.value.digest)
    assert store.path(caught.value.digest) is None, "so the next try asks for it"


@pytest.mark.parametrize("failure", ["cut", "unreadable"])
def test_a_shard_that_fails_once_it_is_open(
    failure: str, manifest: Manifest, store: BlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was mapped into memory: the process was ended at once, by a signal that nobody hears."""
    dataset, spec = Dataset(manifest, store.path, CONTEXT), make_spec()
    first, second = (dataset.microbatch(spec, step, 0)[0] for step in (0, 1))
    dataset.open_shards(shard.digest for shard in manifest.shards)
    dataset.read_ahead(spec, 0, [0], held_out=True)
    whole = {shard.digest: store.held(shard.digest).read_bytes() for shard in manifest.shards}
    with monkeypatch.context() as patch:
        if failure == "cut":
            for digest in whole:
                os.truncate(store.held(digest), 7)
        else:
            patch.setattr(os, "pread", failing_disk)
        assert np.array_equal(dataset.microbatch(spec, 0, 0)[0], first), "it was read ahead"
        dataset.held_out_microbatch(spec, 0)
        problem = ShardDamaged if failure == "cut" else ShardUnreadable
        with pytest.raises(problem, match=r"has been cut|cannot be read: Input"):
            dataset.read_ahead(spec, 1, [0], held_out=False)
        with pytest.raises(problem) as caught:
            dataset.microbatch(spec, 1, 0)
    damaged: str | None = caught.value.digest
    while damaged is not None:
        store.quarantine(damaged)
        with pytest.raises(ShardMissing):
            dataset.microbatch(spec, 1, 0)
        assert store.put_bytes(whole[damaged]) == damaged
        try:
            assert np.array_equal(dataset.microbatch(spec, 1, 0)[0], second)
            damaged = None
        except ShardDamaged as error:
            damaged = error.digest


def failing_disk(descriptor: int, size: int, offset: int) -> bytes:
    raise OSError(errno.EIO, "Input/output error")


def test_what_a_disk_does_not_give_is_not_damaged(
    manifest: Manifest, store: BlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*paths: Path) -> str:
        raise OSError(errno.EIO, "Input/output error")

    digest = manifest.shards[0].digest
    for module in (shard_files, blob_store):
        monkeypatch.setattr(module, "file_digest", fails)
    with pytest.raises(ShardUnreadable, match="cannot be read: Input/output error"):
        Dataset(manifest, store.path, CONTEXT).open_shards([digest])
    assert not store.verify(digest) and store.has(digest), "it may be sound"
    monkeypatch.setattr(blob_store, "file_digest", lambda path: "")
    monkeypatch.setattr(os, "replace", fails)
    assert not store.verify(digest) and store.quarantine(digest) is None


def test_tokens_outside_the_declared_vocabulary(store: BlobStore) -> None:
    payload = np.full(1000, 299).astype("<u2").tobytes()
    digest = store.put_bytes(payload)
    shards = (ShardEntry(digest, 1000, "train"), ShardEntry(digest, 1000, "held_out"))
    entry = TokenizerEntry("c" * 64, 16, 299)
    manifest = Manifest(1, "uint16", entry, shards, Totals(1000, 1000, 1, 1), Notes("", "", ""))
    dataset = Dataset(manifest, store.path, CONTEXT)
    with pytest.raises(UserError, match="holds token 299"):
        dataset.microbatch(make_spec(vocabulary=299), 0, 0)


def test_a_model_with_too_small_a_vocabulary(store: BlobStore) -> None:
    dataset = Dataset(numbered(store, [3]), store.path, CONTEXT)
    with pytest.raises(UserError, match="vocabulary of 65536"):
        dataset.require_fits(make_spec(vocabulary=256))
    with pytest.raises(UserError, match="vocabulary of 65536"):
        dataset.microbatch(make_spec(vocabulary=256), 0, 0)


def test_another_manifest_than_the_run_wants(manifest: Manifest, store: BlobStore) -> None:
    dataset, spec = Dataset(manifest, store.path, CONTEXT), make_spec()
    data = spec.data.model_copy(update={"manifest": manifest.digest()})
    dataset.require_fits(spec.model_copy(update={"data": data}))
    data = spec.data.model_copy(update={"manifest": digest_bytes(b"")})
    with pytest.raises(UserError, match="the run wants"):
        dataset.require_fits(spec.model_copy(update={"data": data}))


def test_a_context_longer_than_the_text(manifest: Manifest, store: BlobStore) -> None:
    with pytest.raises(UserError, match="no shard with one window") as caught:
        Dataset(manifest, store.path, 100_000)
    assert len(caught.value.fixes) == 2


def test_many_shards_do_not_exhaust_file_descriptors(store: BlobStore) -> None:
    dataset = Dataset(numbered(store, [1] * 200), store.path, CONTEXT)
    spec = make_spec(vocabulary=65_536, global_batch=200, microbatch=200)
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(2):
        inputs, _ = dataset.microbatch(spec, 0, 0)
        assert sorted(inputs[:, 0].tolist()) == list(range(200))
    assert len(list(Path("/proc/self/fd").iterdir())) - before < 80
