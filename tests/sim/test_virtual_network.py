"""Messages over directed links, alone and sharing an uplink or downlink."""

from hypothesis import given, settings
from hypothesis import strategies as st

from p2p_dtfm.core.virtual.virtual_network import TransferNetwork
from p2p_dtfm.core.virtual.virtual_time import VirtualTime
from p2p_dtfm.sim.scenario.scenario import lines_of
from tests.sim.sim_support import equal_peers

MS = 1_000_000
MESSAGE_BYTES = 1_000_000
"""Such a message takes 10 ms at the 100 MB/s of the links below."""


def arrivals(
    messages: list[tuple[int, int, int, int]],
    limits: str = "",
    urgent: frozenset[int] = frozenset(),
) -> list[int]:
    """Send (time ms, origin, to, bytes) messages. Returns when each arrives, in ns."""
    time = VirtualTime()
    network = TransferNetwork(time, lines_of(equal_peers(6, limits=limits)), overhead_ns=0)
    arrived = [0] * len(messages)

    def note(number: int) -> None:
        arrived[number] = time.now_ns

    def send(number: int) -> None:
        _, origin, to, size = messages[number]
        network.send(origin, to, size, note, number, urgent=number in urgent)

    for number, message in enumerate(messages):
        time.at(message[0] * MS, send, number)
    time.run()
    return arrived


def test_a_message_takes_its_bytes_and_the_latency() -> None:
    assert arrivals([(0, 0, 1, MESSAGE_BYTES)]) == [20 * MS]


def test_a_link_is_a_queue_and_other_links_are_not_in_it() -> None:
    times = arrivals([(0, 0, 1, MESSAGE_BYTES), (0, 0, 1, MESSAGE_BYTES), (0, 0, 2, MESSAGE_BYTES)])
    assert times == [20 * MS, 30 * MS, 20 * MS]


def test_directions_do_not_disturb_each_other() -> None:
    assert arrivals([(0, 0, 1, MESSAGE_BYTES), (0, 1, 0, MESSAGE_BYTES)]) == [20 * MS, 20 * MS]


def test_links_share_an_uplink() -> None:
    times = arrivals(
        [(0, 0, 1, MESSAGE_BYTES), (0, 0, 2, MESSAGE_BYTES)], limits="uplink_mbps = 800.0"
    )
    assert times == [30 * MS, 30 * MS]


def test_links_share_a_downlink() -> None:
    times = arrivals(
        [(0, 1, 0, MESSAGE_BYTES), (0, 2, 0, MESSAGE_BYTES)], limits="downlink_mbps = 400.0"
    )
    assert times == [50 * MS, 50 * MS]


def test_a_share_is_dealt_anew_when_a_message_comes_and_goes() -> None:
    # alone for 5 ms (half done), shared until the second half is over at 15 ms, alone again
    times = arrivals(
        [(0, 0, 1, MESSAGE_BYTES), (5, 0, 2, MESSAGE_BYTES)], limits="uplink_mbps = 800.0"
    )
    assert times == [25 * MS, 30 * MS]


def test_what_a_slow_link_leaves_others_take() -> None:
    # 1.2 Gbit/s among two links of 800 Mbit/s is 600 each; alone a link gets its own 800
    both = arrivals(
        [(0, 0, 1, 3 * MESSAGE_BYTES), (0, 0, 2, 3 * MESSAGE_BYTES)], limits="uplink_mbps = 1200.0"
    )
    assert both == [50 * MS, 50 * MS]
    assert arrivals([(0, 0, 1, MESSAGE_BYTES)], limits="uplink_mbps = 1200.0") == [20 * MS]


def test_urgent_messages_go_first() -> None:
    messages = [(0, 0, 1, MESSAGE_BYTES), (0, 0, 2, MESSAGE_BYTES), (0, 0, 3, MESSAGE_BYTES)]
    times = arrivals(messages, limits="uplink_mbps = 800.0", urgent=frozenset({2}))
    assert times[2] == 20 * MS
    assert times[:2] == [40 * MS, 40 * MS]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 50), st.integers(0, 5), st.integers(0, 5), st.integers(1, 3_000_000)
        ).filter(lambda message: message[1] != message[2]),
        min_size=1,
        max_size=25,
    ),
    st.sampled_from([200, 800, 2000]),
)
def test_no_uplink_carries_more_than_it_can_and_nothing_is_lost(
    messages: list[tuple[int, int, int, int]], uplink_mbps: int
) -> None:
    times = arrivals(messages, limits=f"uplink_mbps = {uplink_mbps}.0\ndownlink_mbps = 1000.0")
    assert all(times), "every message arrives"
    for peer in range(6):
        for limit, end in ((uplink_mbps, 1), (1000, 2)):
            mine = [(m, at) for m, at in zip(messages, times, strict=True) if m[end] == peer]
            if mine:
                first = min(message[0] for message, _ in mine) * MS
                last = max(at for _, at in mine) - 10 * MS
                carried = sum(message[3] for message, _ in mine)
                assert carried * 1000 <= (last - first + len(mine)) * limit / 8 * 1.0001
    for message, at in zip(messages, times, strict=True):
        assert at >= message[0] * MS + 10 * MS + message[3] * 10
