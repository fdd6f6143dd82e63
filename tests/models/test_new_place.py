"""A result appears whole, beside what others are making there."""

import os
from pathlib import Path

import pytest

from p2p_dtfm.train.hugging_face.new_place import made_whole


def test_what_another_container_is_making_stays(tmp_path: Path) -> None:
    """The process in the other container has a number that is nobody's here."""
    with made_whole(tmp_path / "theirs") as made:
        hidden = made.parent
        made.write_text("half of it")
        elsewhere = hidden.with_name(".p2p-dtfm-partial-999999999-x")
        hidden.rename(elsewhere)
        killed = tmp_path / ".p2p-dtfm-partial-999999998-x"
        killed.mkdir()
        with made_whole(tmp_path / "ours") as ours:
            ours.write_text("all of it")
        assert (elsewhere / "theirs").read_text() == "half of it" and not killed.exists()
        elsewhere.rename(hidden)
    assert (tmp_path / "theirs").read_text() == "half of it"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ours", "theirs"]


@pytest.mark.parametrize("is_directory", [True, False])
def test_what_has_its_name_outlives_a_power_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_directory: bool
) -> None:
    """A disk writes names before contents: a model had its place, and empty files. A repeated
    export took it for done, and did not make it again."""
    forced, replace, fsync = set[int](), os.replace, os.fsync
    named: list[set[int]] = []

    def forces(descriptor: int) -> None:
        fsync(descriptor)
        forced.add(os.fstat(descriptor).st_ino)

    def names(made: Path, place: Path) -> None:
        whole = {path.stat().st_ino for path in (made, *made.rglob("*"))}
        named.append(whole - forced)
        replace(made, place)

    monkeypatch.setattr(os, "fsync", forces)
    monkeypatch.setattr(os, "replace", names)
    with made_whole(tmp_path / "model") as made:
        if is_directory:
            (made / "within").mkdir(parents=True)
            (made / "config.json").write_text("{}")
            (made / "within" / "weights").write_bytes(b"0")
        else:
            made.write_bytes(b"0")
    assert named == [set()] and tmp_path.stat().st_ino in forced
