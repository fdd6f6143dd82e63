"""A result appears whole, beside what others are making there."""

from pathlib import Path

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
