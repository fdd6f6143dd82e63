"""A network in virtual time: delays, losses, repetitions, and links that are cut."""

import random
from dataclasses import dataclass, field

Link = tuple[str, str]


@dataclass
class Network:
    """How badly messages travel. `late` is the share of messages that take `late_ns`."""

    delay_ns: tuple[int, int] = (1_000_000, 100_000_000)
    loss: float = 0.0
    repeat: float = 0.0
    late: float = 0.0
    late_ns: tuple[int, int] = (1_000_000_000, 8_000_000_000)
    cuts: list[frozenset[Link]] = field(default_factory=list)

    def deliveries_ns(self, chance: random.Random, sender: str, receiver: str) -> list[int]:
        """After how long each copy of a message arrives; none if it is lost."""
        if self.is_cut(sender, receiver):
            return []
        copies = 1 + (chance.random() < self.repeat)
        delays = []
        for _ in range(copies):
            if chance.random() >= self.loss:
                late = self.late and chance.random() < self.late
                delays.append(chance.randrange(*(self.late_ns if late else self.delay_ns)))
        return delays

    def is_cut(self, sender: str, receiver: str) -> bool:
        return bool(self.cuts) and any((sender, receiver) in cut for cut in self.cuts)

    def become_good(self) -> None:
        self.loss = self.repeat = self.late = 0.0
        self.cuts.clear()
