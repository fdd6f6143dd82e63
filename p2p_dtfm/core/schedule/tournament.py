"""Which peers measure each other when: rounds in which no peer takes part in two measurements."""


def partner_order(peer_id: str, peers: list[str]) -> list[str | None]:
    """The partner of `peer_id` in each round; None is a round in which it rests.

    Circle method of round-robin tournaments (Kirkman 1847): with an even number n of players the
    last one stays fixed. In round r players i and j of the others meet when i + j = r modulo
    n - 1. A player that would meet itself meets the fixed one. An odd number gets a phantom,
    and meeting it means rest. `peers` is sorted and holds `peer_id`. Peers with the same list have
    the same rounds: in each, partners are mutual, and after the last each pair has met once.
    """
    assert peers == sorted(set(peers)), "all must walk the same circle"
    players: list[str | None] = list(peers)
    if len(players) % 2:
        players.append(None)
    rounds, me = len(players) - 1, peers.index(peer_id)
    return [players[_opponent(me, number, rounds)] for number in range(rounds)]


def _opponent(player: int, number: int, rounds: int) -> int:
    if player == rounds:  # the fixed one meets the player that would meet itself: 2 i = number
        return next(i for i in range(rounds) if 2 * i % rounds == number)
    opponent = (number - player) % rounds
    return rounds if opponent == player else opponent
