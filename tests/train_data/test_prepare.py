"""From files to shards: what goes in, what is left out, and that equal text gives equal bytes."""

import errno
import os
import shutil
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
from data_examples import make_text

from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.train.data import (
    Manifest,
    Skipped,
    file_digest,
    open_prepared,
    prepare,
    prepare_standard_library,
    standard_library_paths,
)
from p2p_dtfm.train.data.first_reading import Pieces, threshold_of
from p2p_dtfm.train.data.manifest import MANIFEST_LIMIT_BYTES, SHARD_LIMIT_TOKENS, ShardEntry
from p2p_dtfm.train.data.prepare import shard_tokens_for
from p2p_dtfm.train.data.text_files import read_pieces


def tokens_of(out: Path, manifest: Manifest, split: str) -> np.ndarray:
    dtype = {"uint8": "u1", "uint16": "<u2", "uint32": "<u4"}[manifest.token_type]
    return np.concatenate(
        [
            np.fromfile(out / "blobs" / shard.digest, dtype)
            for shard in manifest.shards
            if shard.split == split
        ]
    )


def documents_of(out: Path, manifest: Manifest, split: str) -> list[bytes]:
    stream = tokens_of(out, manifest, split).astype("u1").tobytes()
    assert stream.endswith(b"\0")
    return stream[:-1].split(b"\0")


def test_round_trip_of_every_document(texts: Path, tmp_path: Path) -> None:
    manifest = prepare([texts], tmp_path / "out", held_out_fraction=0.1)
    train = documents_of(tmp_path / "out", manifest, "train")
    held_out = documents_of(tmp_path / "out", manifest, "held_out")
    originals = [path.read_bytes() for path in sorted(texts.iterdir())]
    assert b"".join(sorted(train + held_out)) == b"".join(sorted(originals))
    assert train == [text for text in originals if text in set(train)], "in the order of names"
    assert not set(train) & set(held_out)
    assert 0.08 < sum(map(len, held_out)) / sum(map(len, originals)) < 0.2
    assert manifest.totals.documents == 40
    assert manifest.totals.text_bytes == sum(map(len, originals))


def test_equal_text_gives_an_equal_manifest_wherever_it_lies(texts: Path, tmp_path: Path) -> None:
    first = prepare([texts], tmp_path / "a")
    elsewhere = tmp_path / "some" / "where"
    shutil.copytree(texts, elsewhere)
    second = prepare([elsewhere], tmp_path / "b")
    again = prepare([elsewhere], tmp_path / "b")
    assert first.digest() == second.digest() == again.digest()
    assert (tmp_path / "a" / "manifest.json").read_bytes() == first.to_bytes()
    (elsewhere / "07.txt").write_text("changed " * 200)
    assert prepare([elsewhere], tmp_path / "b").digest() != first.digest()


def test_files_are_named_by_their_hash_and_nothing_else_is_left(
    texts: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    prepare([texts], out)
    manifest = prepare([texts / "01.txt", texts / "02.txt"], out, shard_tokens=300)
    blobs = {path.name for path in (out / "blobs").iterdir()}
    assert blobs == {*manifest.blobs(), manifest.digest()}, "blobs of the first run are gone"
    assert {path.name for path in out.iterdir()} == {"manifest.json", "tokenizer.json", "blobs"}
    for digest, size_bytes in manifest.blobs().items():
        assert file_digest(out / "blobs" / digest) == digest
        assert (out / "blobs" / digest).stat().st_size == size_bytes
    assert all(shard.tokens == 300 for shard in manifest.shards_in("train")[:-1])


@pytest.mark.parametrize("text_bytes", [1, 10**9, 10**11, 10**12, 10**13])
def test_of_any_text_a_manifest_may_name_all_shards(text_bytes: int) -> None:
    """Of a terabyte it named a million: that was found out when all were written, and the shards
    could not be made larger."""
    shard_tokens = shard_tokens_for(text_bytes, documents=text_bytes // 1000)
    count = 2 + (text_bytes + text_bytes // 1000) // shard_tokens
    entry = ShardEntry("f" * 64, shard_tokens, "held_out")
    assert count < 1 << 17 and shard_tokens <= SHARD_LIMIT_TOKENS
    assert count * (1 + len(msgspec.json.encode(entry))) < MANIFEST_LIMIT_BYTES - (1 << 18)
    assert shard_tokens == 1 << 20 or count > 1 << 15, "and is no larger than that asks for"


def test_shards_grow_with_the_text(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = sys.modules[shard_tokens_for.__module__]
    monkeypatch.setattr(module, "LEAST_SHARD_TOKENS", 256)
    monkeypatch.setattr(module, "MOST_SHARDS", 4)
    manifest = prepare([texts], tmp_path / "out")
    assert manifest.totals.train_tokens > 8 * 256
    assert 2 < len(manifest.shards) <= 6


def test_one_big_file_is_split_too(tmp_path: Path) -> None:
    path = tmp_path / "big.txt"
    path.write_text(make_text(300_000))
    manifest = prepare([path], tmp_path / "out")
    fraction = manifest.totals.held_out_tokens / manifest.totals.text_bytes
    assert 0.02 <= fraction < 0.04
    train = documents_of(tmp_path / "out", manifest, "train")
    held_out = documents_of(tmp_path / "out", manifest, "held_out")
    text = path.read_bytes()
    assert all(part in text for part in train + held_out)
    assert sum(map(len, train + held_out)) == len(text)


def test_a_huge_line_of_wide_characters_is_never_cut_within_one(tmp_path: Path) -> None:
    path = tmp_path / "line.txt"
    path.write_text("模🙂é" * 60_000)
    manifest = prepare([path], tmp_path / "out")
    parts = documents_of(tmp_path / "out", manifest, "train")
    assert "".join(part.decode("utf-8") for part in parts).strip("模🙂é") == ""


@pytest.mark.parametrize("piece_bytes", [4, 5, 7, 64, 1000])
def test_pieces_join_to_the_file(tmp_path: Path, piece_bytes: int) -> None:
    path = tmp_path / "text"
    path.write_text(make_text(900) + "🙂" * 50 + "x")
    pieces = list(read_pieces(path, piece_bytes))
    assert b"".join(pieces) == path.read_bytes()
    assert all(0 < len(piece) <= piece_bytes for piece in pieces)


def test_what_is_not_text_is_skipped_and_counted(texts: Path, tmp_path: Path) -> None:
    (texts / "zero.bin").write_bytes(b"looks like text\0but is not" * 50)
    (texts / "latin.txt").write_bytes("naïve".encode("latin-1") * 50)
    (texts / "late.txt").write_bytes(b"fine\n" * 100_000 + b"\xff")
    (texts / "cut.txt").write_bytes("🙂".encode()[:3])
    (texts / "empty.txt").touch()
    (texts / ".hidden").write_text("secret")
    os.mkfifo(texts / "pipe")
    skipped = Skipped()
    manifest = prepare([texts], tmp_path / "out", skipped=skipped)
    assert (skipped.not_text, skipped.empty, skipped.hidden, skipped.special) == (4, 1, 1, 1)
    assert manifest.totals.documents == 40


def test_links_do_not_loop_and_nothing_comes_twice(texts: Path, tmp_path: Path) -> None:
    plain = prepare([texts], tmp_path / "plain")
    (texts / "loop").symlink_to(texts, target_is_directory=True)
    (texts / "again.txt").symlink_to(texts / "01.txt")
    os.link(texts / "02.txt", texts / "zz-hard-link.txt")
    skipped = Skipped()
    paths = [texts, texts / "loop", texts / "03.txt"]
    assert prepare(paths, tmp_path / "out", skipped=skipped).digest() == plain.digest()
    assert skipped.links == 4


def test_equal_documents_are_never_on_both_sides(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    for copy in ("a", "b", "c"):
        (folder / copy).mkdir(parents=True)
        for number in range(30):
            (folder / copy / f"{number}.txt").write_text(make_text(600, number))
    manifest = prepare([folder], tmp_path / "out", held_out_fraction=0.2)
    train = documents_of(tmp_path / "out", manifest, "train")
    held_out = documents_of(tmp_path / "out", manifest, "held_out")
    assert held_out and not set(train) & set(held_out)


@pytest.mark.parametrize("distinct", [3, 1 << 20, 1 << 64])
def test_what_is_held_out_is_found_in_little_memory(distinct: int) -> None:
    """Of 100 million documents sorting their keys took four gigabytes."""
    chance = np.random.default_rng(7)
    keys = chance.integers(0, distinct, 200_000, dtype=np.uint64)
    sizes_bytes = chance.integers(1, 1 << 16, len(keys), dtype=np.uint32)
    pieces = Pieces()
    pieces.keys.frombytes(keys.tobytes())
    pieces.sizes_bytes.frombytes(sizes_bytes.tobytes())
    in_order = np.argsort(keys, kind="stable")
    up_to = np.cumsum(sizes_bytes[in_order], dtype=np.int64)
    for part in (1e-9, 0.02, 0.5, 1.0, 1.5):
        wanted_bytes = part * float(up_to[-1])
        place = min(int(np.searchsorted(up_to, wanted_bytes)), len(keys) - 1)
        tracemalloc.start()
        found = threshold_of(pieces, wanted_bytes)
        peak_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert found == keys[in_order[place]] and peak_bytes < 1 << 22


def test_output_within_the_input_is_not_read_back(texts: Path, tmp_path: Path) -> None:
    first = prepare([texts], texts / "prepared")
    assert prepare([texts], texts / "prepared").digest() == first.digest()


def test_data_that_were_prepared_before_are_no_text(texts: Path, tmp_path: Path) -> None:
    """Tokens of bytes look like it, and what was held out would be trained on."""
    (texts / "long.txt").write_text(make_text(9000, 99))
    first = prepare([texts], texts / "first", shard_tokens=1000)
    skipped = Skipped()
    again = prepare([texts], texts / "second", shard_tokens=1000, skipped=skipped)
    assert again.digest() == first.digest() and skipped.prepared == 1
    (texts / "blobs").mkdir()
    (texts / "blobs" / "own.txt").write_text(make_text(800, 98))
    more = prepare([texts], tmp_path / "out", shard_tokens=1000)
    assert more.totals.documents == first.totals.documents + 1, "the name alone says nothing"
    with pytest.raises(UserError, match="1 prepared data"):
        prepare([texts / "first"], tmp_path / "other")


@pytest.mark.parametrize("content", [None, b"", b"\0\1\2"])
def test_a_directory_without_text(tmp_path: Path, content: bytes | None) -> None:
    folder = tmp_path / "none"
    folder.mkdir()
    if content is not None:
        (folder / "file").write_bytes(content)
    with pytest.raises(UserError, match=r"no text found in .*none") as caught:
        prepare([folder], tmp_path / "out")
    assert caught.value.fixes
    assert not (tmp_path / "out").exists()


def test_too_little_text(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("a few words")
    with pytest.raises(UserError, match="too little text") as caught:
        prepare([tmp_path / "short.txt"], tmp_path / "out")
    assert "add text" in caught.value.fixes and "--held-out" not in str(caught.value.fixes)
    assert not (tmp_path / "out" / "manifest.json").exists()
    words = "some more words, and others\n" * 300
    (tmp_path / "short.txt").write_text(words + make_text(9000))
    with pytest.raises(UserError, match="held-out tokens do not make one") as caught:
        prepare([tmp_path / "short.txt"], tmp_path / "out", context=500, vocabulary=2000)
    assert "--held-out" in caught.value.fixes[-1]
    prepare([tmp_path / "short.txt"], tmp_path / "out", context=500, vocabulary=2000,
            held_out_fraction=0.3)  # fmt: skip


def test_a_path_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot read .*nowhere: No such file"):
        prepare([tmp_path / "nowhere"], tmp_path / "out")


def test_a_file_that_cannot_be_read(texts: Path, tmp_path: Path) -> None:
    """Deleted between finding and reading: to a reader the same as any other failure."""
    paths = sorted(texts.iterdir())

    def delete(done_bytes: int, total_bytes: int, stage: str) -> None:
        paths[7].unlink(missing_ok=True)

    skipped = Skipped()
    manifest = prepare([texts], tmp_path / "out", skipped=skipped, progress=delete)
    assert skipped.unreadable == 1 and manifest.totals.documents == 39
    assert paths[7].name in skipped.unreadable_examples[0]
    paths[7].write_text("back again")
    with pytest.raises(UserError, match=rf"cannot read .*{paths[7].name}"):
        prepare(paths, tmp_path / "out", progress=delete)


def test_a_foreign_directory_is_left_alone(texts: Path, tmp_path: Path) -> None:
    out = tmp_path / "home"
    out.mkdir()
    (out / "thesis.tex").write_text("precious")
    with pytest.raises(UserError, match=r"thesis\.tex"):
        prepare([texts], out)
    assert [path.name for path in out.iterdir()] == ["thesis.tex"]
    (out / "thesis.tex").rename(out / "manifest.json")
    with pytest.raises(UserError, match="in the way"):
        prepare([texts], out)
    assert (out / "manifest.json").read_text() == "precious"


def test_a_tokenizer_of_its_users_stays(texts: Path, tmp_path: Path) -> None:
    """Such a file has the name that the data's own has, and was replaced by it."""
    out = tmp_path / "model"
    out.mkdir()
    (out / "tokenizer.json").write_text("of a model")
    with pytest.raises(UserError, match=r"such as 'tokenizer\.json'"):
        prepare([texts], out)
    assert (out / "tokenizer.json").read_text() == "of a model" and len(list(out.iterdir())) == 1
    (out / "tokenizer.json").unlink()
    prepare([texts], out)
    (out / "manifest.json").unlink()  # as if it had been interrupted before that was there
    prepare([texts], out)


def test_output_that_is_a_file(texts: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="another --out"):
        prepare([texts], tmp_path / "file")


def test_an_interrupted_run_is_taken_up(texts: Path, tmp_path: Path) -> None:
    calm = prepare([texts], tmp_path / "calm")

    def interrupt(done_bytes: int, total_bytes: int, stage: str) -> None:
        if stage == "writing":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare([texts], tmp_path / "out", shard_tokens=1000, progress=interrupt)
    assert not (tmp_path / "out" / "manifest.json").exists()
    (tmp_path / "out" / "blobs" / ".tmp-left-over").write_text("x")
    assert prepare([texts], tmp_path / "out").digest() == calm.digest()
    assert not list((tmp_path / "out" / "blobs").glob(".tmp-*"))


def test_a_file_that_changes_meanwhile(texts: Path, tmp_path: Path) -> None:
    def spoil(done_bytes: int, total_bytes: int, stage: str) -> None:
        if stage == "reading" and done_bytes == total_bytes:
            (texts / "05.txt").write_bytes(b"\0")

    with pytest.raises(UserError, match=r"05\.txt changed"):
        prepare([texts], tmp_path / "out", progress=spoil)


@pytest.mark.parametrize("vocabulary", [None, 300])
def test_a_file_that_grows_or_is_another_meanwhile(
    vocabulary: int | None, texts: Path, tmp_path: Path
) -> None:
    """The manifest would tell of other text than the tokens are of."""
    log = texts / "05.txt"

    def written(change: Callable[[str], str]) -> None:
        def spoil(done_bytes: int, total_bytes: int, stage: str) -> None:
            if stage == "reading" and done_bytes == total_bytes:
                log.write_text(change(text))

        text = log.read_text()
        with pytest.raises(UserError, match=r"05\.txt changed while it was being read"):
            prepare([texts], tmp_path / "out", progress=spoil, vocabulary=vocabulary)

    written(lambda text: text + make_text(3000, 77))
    written(lambda text: text.replace("e", "o"))
    assert prepare([texts], tmp_path / "out").totals.documents == 40


def test_a_mark_of_byte_order_is_nobodys_word(texts: Path, tmp_path: Path) -> None:
    plain = prepare([texts], tmp_path / "plain")
    for path in texts.iterdir():
        path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert prepare([texts], tmp_path / "out").shards == plain.shards


def test_a_full_disk_is_said_plainly(texts: Path, tmp_path: Path) -> None:
    """RLIMIT_FSIZE makes a real write fail; a child process, since the limit cannot be raised."""
    program = f"""
import resource, signal
from collections.abc import Callable
from pathlib import Path
from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.train.data import prepare
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    prepare([Path({str(texts)!r})], Path({str(tmp_path / "out")!r}))
except UserError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-B", "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert os.strerror(errno.EFBIG) in done.stdout and "free disk space" in done.stdout
    assert not list((tmp_path / "out" / "blobs").iterdir()), "nothing half-written is left"


@pytest.mark.parametrize(
    "bad",
    [
        {"vocabulary": 100},
        {"vocabulary": 1 << 30},
        {"shard_tokens": 0},
        {"shard_tokens": 50},
        {"held_out_fraction": 0.0},
        {"held_out_fraction": float("nan")},
        {"name": "x" * 3000},
    ],
)
def test_bad_options(texts: Path, tmp_path: Path, bad: dict) -> None:
    with pytest.raises(UserError) as caught:
        prepare([texts], tmp_path / "out", **bad)
    assert caught.value.fixes


def test_notes_in_an_odd_encoding_and_odd_file_names(texts: Path, tmp_path: Path) -> None:
    (texts / os.fsdecode(b"na\xefve.txt")).write_text(make_text(800, 99))
    manifest = prepare([texts], tmp_path / "out", name="na\udcefve")
    assert manifest.notes.name == "na?ve" and manifest.totals.documents == 41


def test_progress_reaches_its_total_in_each_stage(texts: Path, tmp_path: Path) -> None:
    calls: list[tuple[int, int, str]] = []
    prepare(
        [texts],
        tmp_path / "out",
        vocabulary=300,
        progress=lambda done_bytes, total_bytes, stage: calls.append(
            (done_bytes, total_bytes, stage)
        ),
    )
    assert list(dict.fromkeys(stage for _, _, stage in calls)) == [
        "reading",
        "learning tokens",
        "writing",
    ]
    for stage in ("reading", "learning tokens", "writing"):
        amounts = [(done, total) for done, total, name in calls if name == stage]
        assert amounts == sorted(amounts) and amounts[-1][0] == amounts[-1][1]


def test_byte_pairs(texts: Path, tmp_path: Path) -> None:
    manifest = prepare([texts], tmp_path / "a", vocabulary=300)
    assert manifest.vocabulary == 300 and manifest.token_type == "uint16"
    assert prepare([texts], tmp_path / "b", vocabulary=300).digest() == manifest.digest()
    prepared = open_prepared(tmp_path / "a")
    assert manifest.totals.train_tokens < manifest.totals.text_bytes / 2
    pieces = prepared.tokenizer.decode(tokens_of(tmp_path / "a", manifest, "train")).split("\0")
    originals = {path.read_text() for path in texts.iterdir()}
    assert set(pieces) - {""} <= originals


def test_the_standard_library(tmp_path: Path) -> None:
    paths = standard_library_paths()
    size_bytes = sum(path.stat().st_size for path in paths)
    assert 2_000_000 < size_bytes <= 12_000_000
    assert not any("site-packages" in path.parts or "test" in path.parts for path in paths)
    manifest = prepare_standard_library(tmp_path / "out")
    assert manifest.digest() == prepare_standard_library(tmp_path / "again").digest()
    assert manifest.vocabulary == 256
    assert manifest.notes.licence == "PSF-2.0"
    assert str(Path(os.__file__).parent).encode() not in manifest.to_bytes(), "no paths in it"


def test_opening_finds_what_is_missing(texts: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="p2p-dtfm prepare"):
        open_prepared(tmp_path / "nothing")
    out = tmp_path / "out"
    manifest = prepare([texts], out, vocabulary=300)
    assert open_prepared(out).manifest == manifest
    assert open_prepared(out).store.has(manifest.digest())
    shard = out / "blobs" / manifest.shards[0].digest
    content = shard.read_bytes()
    shard.write_bytes(content[:-2])
    with pytest.raises(UserError, match="wrong size"):
        open_prepared(out)
    shard.write_bytes(content)
    named = out / "blobs" / manifest.digest()
    named.unlink()  # a founder ended with a traceback: its run is given to others from there
    with pytest.raises(UserError, match="missing"):
        open_prepared(out)
    named.write_bytes(manifest.to_bytes())
    tokenizer = out / "blobs" / manifest.tokenizer.digest
    tokenizer.write_bytes(tokenizer.read_bytes().replace(b"BPE", b"BPF"))
    with pytest.raises(UserError, match="corrupt"):
        open_prepared(out)
    (out / "manifest.json").write_bytes(manifest.to_bytes()[:-1])
    with pytest.raises(UserError, match="cannot be used"):
        open_prepared(out)


def test_what_is_to_be_typed_instead_works(texts: Path, tmp_path: Path) -> None:
    """A text named where prepared data belong had its own place named to prepare into."""
    text = tmp_path / "mine.txt"
    text.write_text("x " * 3000)
    with pytest.raises(UserError) as caught:
        open_prepared(text)
    assert caught.value.fixes[0].endswith(f"p2p-dtfm prepare {text} --out {tmp_path}/mine-data")
    assert caught.value.fixes[1] == f'then say source = "{tmp_path}/mine-data"'
    out = tmp_path / "out"
    prepare([texts], out)
    (out / "manifest.json").write_text("{}")
    with pytest.raises(UserError) as caught:
        open_prepared(out)
    assert caught.value.fixes[0].endswith("--overwrite"), "else prepare refuses what lies there"


def test_a_failed_run_leaves_the_earlier_result_whole(texts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    manifest = prepare([texts], out)
    (tmp_path / "short.txt").write_text("a few words")
    with pytest.raises(UserError, match="too little text"):
        prepare([tmp_path / "short.txt"], out)
    prepared = open_prepared(out)
    assert prepared.manifest == manifest
    assert all(prepared.store.verify(digest) for digest in manifest.blobs())
