"""Nobody makes a peer knock at a third party's door."""

from p2p_dtfm.core.gate.dialling import (
    ADDRESSES_OF_ONE,
    CLAIMS_EVERY_NS,
    DOOR_KNOCKS,
    DOORS_REMEMBERED,
    HOST_CLAIMS,
    HOST_NAMED,
    LOOKS_BURST,
    SECOND_NS,
    Dialling,
)

VICTIM = ("192.0.2.1", 80)


def test_a_door_that_hundreds_name_is_knocked_at_twice() -> None:
    dialling, knocks = Dialling(), 0
    for second in range(300):
        knocks += len(dialling.choose([VICTIM], None, second * SECOND_NS))
    assert knocks == DOOR_KNOCKS == HOST_CLAIMS


def test_what_was_no_knock_counts_for_nothing() -> None:
    """libp2p dials nobody twice within seconds, and two calls that cross are no refusal. Two
    newcomers took each other for strangers for ten minutes."""
    dialling = Dialling()
    for second in range(0, 60, 5):
        (door,) = dialling.choose([VICTIM], None, second * SECOND_NS)
        dialling.give_back([door])
    knocks = sum(len(dialling.choose([VICTIM], None, s * SECOND_NS)) for s in range(60, 300))
    assert knocks == DOOR_KNOCKS, "the others do"
    dialling.give_back([("198.51.100.9", 1)])


def test_other_ports_of_a_victim_do_not_help_where_nobody_calls_from_it() -> None:
    dialling, knocks = Dialling(), 0
    for second in range(300):
        doors = [(VICTIM[0], 1000 + 16 * second + port) for port in range(16)]
        knocks += len(dialling.choose(doors, "198.51.100.9", second * SECOND_NS))
    assert knocks == HOST_CLAIMS


def test_claims_are_few_and_slow() -> None:
    dialling = Dialling()
    many = [[(f"198.51.100.{host}", port) for port in range(16)] for host in range(100)]
    assert len(dialling.choose(many[0], None, 0)) == ADDRESSES_OF_ONE
    assert dialling.choose(many[1], None, CLAIMS_EVERY_NS - 1) == []
    assert len(dialling.choose(many[1], None, CLAIMS_EVERY_NS)) == ADDRESSES_OF_ONE
    assert dialling.refused == 1


def test_who_calls_from_a_host_is_called_back_there_at_once() -> None:
    dialling = Dialling()
    for port in range(1, 33):  # a swarm on one machine
        door = ("198.51.100.7", port)
        assert dialling.choose([VICTIM, door], door[0], 0) == [door]
        dialling.answered(door)
        assert dialling.choose([door], door[0], 0) == [door], "it may be called again"


def test_the_same_door_at_the_callers_own_host_is_not_knocked_at_again_and_again() -> None:
    dialling = Dialling()
    door = ("198.51.100.7", 80)
    assert sum(len(dialling.choose([door], door[0], n * SECOND_NS)) for n in range(300)) == 2
    assert dialling.choose([door], door[0], 700 * SECOND_NS) == [door]


def test_the_directory_makes_nobody_knock_more_often_than_ten_times() -> None:
    dialling = Dialling()
    doors = [[(VICTIM[0], number)] for number in range(4000)]
    assert sum(len(dialling.look_up(each, False, 0)) for each in doors) == HOST_NAMED <= 10


def test_looking_for_unknown_nodes_is_rationed() -> None:
    dialling = Dialling()
    now_ns = 1000 * SECOND_NS
    assert sum(dialling.may_look(now_ns) for _ in range(1000)) == LOOKS_BURST
    assert dialling.may_look(now_ns + 2 * SECOND_NS)


def test_what_is_remembered_is_bounded() -> None:
    dialling = Dialling()
    for number in range(2 * DOORS_REMEMBERED):
        dialling.look_up([(f"host-{number}", 1)], False, 0)
    assert len(dialling._doors) <= DOORS_REMEMBERED and len(dialling._named) <= DOORS_REMEMBERED


def test_who_looks_for_members_finds_many_at_one_host_that_were_there() -> None:
    dialling = Dialling()
    doors = [[(VICTIM[0], number)] for number in range(40)]
    assert all(dialling.look_up(each, True, 0) for each in doors)
    assert sum(len(dialling.look_up([VICTIM], True, 0)) for _ in range(50)) <= 10
