"""Memory of frames is used again, and never while it can still be seen."""

from p2p_dtfm.net.streams.frame_memory import SMALLEST_BYTES, FrameMemory

SIZE = SMALLEST_BYTES


def test_what_nobody_holds_is_given_again_and_what_a_view_shows_is_not() -> None:
    memory = FrameMemory(4 * SIZE)
    first = memory.take(SIZE)
    place = id(first)
    view = memoryview(first)[5:9]
    del first
    second = memory.take(SIZE)
    assert id(second) != place, "a view shows it"
    del view
    assert id(memory.take(SIZE)) == place
    assert len(memory.take(2 * SIZE)) == 2 * SIZE, "another size is another memory"


def test_no_more_is_kept_than_is_allowed() -> None:
    memory = FrameMemory(4 * SIZE)
    held = [memory.take(SIZE) for _ in range(20)]
    assert len({id(each) for each in held}) == 20
    assert memory._held_bytes <= 4 * SIZE
    del held
    again = [memory.take(size) for size in (SIZE, 2 * SIZE, SIZE, 3 * SIZE, 100, 5 * SIZE)]
    assert [len(each) for each in again] == [SIZE, 2 * SIZE, SIZE, 3 * SIZE, 100, 5 * SIZE]
    assert memory._held_bytes == sum(map(len, memory._given)) <= 4 * SIZE
