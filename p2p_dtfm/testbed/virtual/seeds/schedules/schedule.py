"""What is to happen in a seed: how many daemons there are, and what is done to them when."""

from dataclasses import dataclass, replace

NAMES = "abcdefghijkl"
FIRST_S, LAST_S = 3.0, 26.0
"""After the last of those that begin the run was started."""
QUICK_STEPS = 16
"""A step takes a tenth of a second of processor time: where faults begin with steps, fewer do."""
CALM_STEPS = 32
"""Each fault takes one or two."""
LASTING_S = (0.3, 1.0, 3.0, 6.0, 12.0)
BACK_S, AHEAD_S = -7200.0, 86_400.0
"""How far wall clocks jump."""

KINDS = {
    "kill": 4,
    "power cut": 2,
    "lying disk": 1,
    "old disk": 1,
    "pause": 3,
    "leave": 2,
    "join": 0,
    "cut": 3,
    "one-way cut": 2,
    "partition": 1,
    "slow link": 2,
    "lossy link": 1,
    "doubled calls": 1,
    "full disk": 2,
    "slow disk": 1,
    "clock": 2,
    "outage": 0,
    "lost memory": 0,
    "swizzle": 0,
    "damaged bytes": 0,
    "busy machine": 0,
    "lost layer": 0,
    "life ahead": 0,
    "late word": 0,
    "dumb p2pd": 0,
    "dead relay": 0,
}
"""How often each is drawn; each newcomer joins once, and some seeds have the last ten."""
CRASHES = {
    "kill": 6,
    "power cut": 3,
    "full disk": 2,
    "slow disk": 1,
    "clock": 2,
    "join": 0,
    "lost memory": 0,
    "lost layer": 0,
    "life ahead": 0,
    "late word": 0,
}
"""In every fourth seed only these: in it what is told to be safe is held to its word."""
UNDISTURBED = frozenset({"lie", "join"})
"""With these a verdict is about what was done, and about nobody who was away meanwhile."""
OF_LINKS = frozenset({"cut", "one-way cut", "slow link", "lossy link", "doubled calls"})


@dataclass(frozen=True)
class Fault:
    """Begins `at_s` after all that begin the run were started, and ends after a while."""

    at_s: float
    lasts_s: float
    kind: str
    whom: tuple[str, ...]
    """Those to whom it is done: one, the two ends of a link, one side of a partition, who comes
    back first, or nobody yet, where it is done to who relays for the most by then."""
    draw: float
    """Between 0 and 1: how far, where that is asked."""
    what: str = ""
    """Of lies: in what."""
    at_step: int | None = None
    """It begins sooner if so many steps are committed,"""
    after_s: float = 0.0
    """and so long after that."""
    at_message: str = ""
    """By now it waits for a message of this kind, and is done to one end of its way, or to both:
    `seeds.watching.moments`."""
    is_of_goal: bool = False
    """To whom it is said, or from there."""
    comes_before: bool = False
    """Who was to say it to several dies before the word for this one has left."""
    late_s: float = 0.0
    """The message it waits for, and what follows of its kind on that way, leaves so much later,"""
    is_of_third: bool = False
    """and it is done meanwhile to somebody who neither says it nor is told."""

    def __str__(self) -> str:
        what = f" ({self.what})" if self.what else ""
        if self.at_message:
            what += f" at {self.at_message}"
        if self.late_s:
            what += f", which is {self.late_s:.1f} s late"
        return f"{self.kind} {'-'.join(self.whom)}{what}"


@dataclass(frozen=True)
class Schedule:
    """Of one seed."""

    begun: tuple[str, ...]
    """The founder first."""
    joiners: tuple[str, ...]
    faults: tuple[Fault, ...]
    is_small: bool = False
    """The machines are near one another and have little memory: no one of them has room for the
    whole model, few layers are held twice, and guardians keep up with each step."""
    is_quick: bool = False
    """The run is short,"""
    is_long: bool = False
    """or has as many steps as others, of which some are left long after all is mended."""
    waits_for_a_step: bool = False
    """Faults begin after the first step, not after the daemons did."""
    rooms_are_tight: bool = False
    """What large models fill the small one fills, too: `seeds.tight_rooms`."""
    goes_rarer_ways: bool = False
    """What is rare on machines happens all the time: `seeds.rarer`."""
    is_calm: bool = False
    """Each fault, or two at a time, waits until the one before is over, and a step is committed
    since: who is stuck is not helped by the next one."""
    is_slow: bool = False
    """Machines compute so slowly that whoever is away for a minute misses a part of the run alone;
    and once all is mended nobody stays out of the others' view."""
    goes_on_after_the_end: bool = False
    """Faults that are not over with the last step begin all the same."""
    stays_resident: bool = False
    """Who is paused by its owner comes back in the same process."""
    writes_samples: bool = False
    """The model writes as it learns."""
    is_watched: bool = False
    """Somebody asks every daemon all that it tells, again and again."""
    is_audited: bool = False
    """Work is computed again by others before a step commits."""
    is_narrow: bool = False
    """Links are slow enough for who dies to be in the middle of a transfer."""
    lanes_are_apart: bool = False
    """What is sent over one lane says nothing of when it comes over another one."""
    model: str = ""
    """Which one is trained: `run.MODELS`; empty: the plain one."""
    is_invited: bool = False
    """Whoever joins shows a line of the founder's."""
    is_private: bool = False
    """All that begin but the last one are named as those that alone may have ends and data."""
    behind: tuple[str, ...] = ()
    """Who is behind a router: nobody can call them."""
    liars: tuple[str, ...] = ()
    """Who ever lies: a quarter of those that begin, at most."""
    lie_together: bool = False
    """Each finds the others' work right, and says so."""
    audit_rate: float = 0.5
    """Where it is audited."""

    @property
    def callable_first(self) -> tuple[str, ...]:
        """Whose address those are given that begin after them."""
        return tuple(name for name in self.begun if name not in self.behind)

    @property
    def has_only_crashes(self) -> bool:
        """Nobody is out of reach but who is dead."""
        return all(fault.kind in CRASHES for fault in self.faults)

    @property
    def lies(self) -> list[tuple[str, str]]:
        """Who lies in what."""
        return [(name, fault.what) for fault in self.faults if fault.what for name in fault.whom]

    @property
    def send_damaged(self) -> set[str]:
        """Whose bytes are changed before they are sent."""
        return {fault.whom[0] for fault in self.faults if fault.kind == "damaged bytes"}

    def only(self, kept: frozenset[int]) -> "Schedule":
        """With these of its faults, by their place in it."""
        faults = tuple(fault for place, fault in enumerate(self.faults) if place in kept)
        return replace(self, faults=faults)
