"""A network in virtual time: delays, losses, repetitions, and links that are cut."""

import random
from dataclasses import dataclass, field

DirectedLink = tuple[str, str]


@dataclass
class LossyNetwork:
    """How badly messages travel. `late` is the share of messages that take `late_ns`."""

    delay_ns: tuple[int, int] = (1_000_000, 100_000_000)
    loss: float = 0.0
    repeat: float = 0.0
    late: float = 0.0
    late_ns: tuple[int, int] = (1_000_000_000, 8_000_000_000)
    cuts: list[frozenset[DirectedLink]] = field(default_factory=list)
    lost_count: int = 0
    repeated_count: int = 0
    late_count: int = 0
    """Messages that were late. They arrive after many that were sent after them."""

    def deliveries_ns(self, chance: random.Random, sender: str, receiver: str) -> list[int]:
        """The delays after which copies of a message arrive; none if it is lost."""
        if self.is_cut(sender, receiver):
            return []
        draw, copies = chance.random, 1
        if self.repeat and draw() < self.repeat:
            copies, self.repeated_count = 2, self.repeated_count + 1
        delays = []
        for _ in range(copies):
            if self.loss and draw() < self.loss:
                self.lost_count += 1
                continue
            shortest_ns, longest_ns = self.delay_ns
            if self.late and draw() < self.late:
                self.late_count += 1
                shortest_ns, longest_ns = self.late_ns
            delays.append(shortest_ns + int(draw() * (longest_ns - shortest_ns)))
        return delays

    def is_cut(self, sender: str, receiver: str) -> bool:
        return bool(self.cuts) and any((sender, receiver) in cut for cut in self.cuts)

    def become_good(self) -> None:
        self.loss = self.repeat = self.late = 0.0
        self.cuts.clear()
