"""What is to happen in a seed: how many daemons there are, and what is done to them when."""

from dataclasses import dataclass, replace

NAMES = "abcdefghijkl"
FIRST_S, LAST_S = 3.0, 26.0
"""Time after the last peer that begins the run was started."""
QUICK_STEPS = 16
"""A step takes a tenth of a second of processor time: where faults begin with steps, fewer do."""
CALM_STEPS = 32
"""Each fault takes one or two steps."""
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
    "lid": 0,
    "go home": 0,
}
"""How often each kind is drawn. Each newcomer joins once, and only some seeds have the last ten."""
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
    "lid": 0,
}
"""The only kinds in every fourth seed, which holds what is told to be safe to its word."""
UNDISTURBED = frozenset({"lie", "join"})
"""Faults beside which a verdict is about lies alone, and not about absent peers."""
OF_LINKS = frozenset({"cut", "one-way cut", "slow link", "lossy link", "doubled calls"})


@dataclass(frozen=True)
class Fault:
    """Begins `at_s` after all that begin the run were started, and ends after `lasts_s`."""

    at_s: float
    lasts_s: float
    kind: str
    whom: tuple[str, ...]
    """The peers to which it is done: one, the two ends of a link, one side of a partition, or those
    that come back first. Empty, where it is done to the busiest relay of that time."""
    draw: float
    """Between 0 and 1. It decides what the fault's kind leaves to chance."""
    what: str = ""
    """The kind of a lie."""
    at_step: int | None = None
    """The fault begins sooner, if so many steps are committed."""
    after_s: float = 0.0
    """How long after `at_step`, or after its message, it begins."""
    at_message: str = ""
    """From its time on, the fault waits for a message of this kind, and is done to one end of its
    way, or to both: `seeds.watching.moments`."""
    is_of_goal: bool = False
    """It is done to the hearer, or on the way from there, not to the speaker."""
    comes_before: bool = False
    """The speaker dies after its first word to several, before the word for this hearer leaves."""
    late_s: float = 0.0
    """How much later the message leaves that it waits for, with what follows of its kind on that
    way."""
    is_of_third: bool = False
    """It is done meanwhile to a peer that neither says nor hears the message."""

    def __str__(self) -> str:
        what = f" ({self.what})" if self.what else ""
        if self.at_message:
            what += f" at {self.at_message}"
        if self.late_s:
            what += f", which is {self.late_s:.1f} s late"
        return f"{self.kind} {'-'.join(self.whom)}{what}"


@dataclass(frozen=True)
class Schedule:
    """What is to happen in one seed."""

    begun: tuple[str, ...]
    """Peers that begin the run, the founder first."""
    joiners: tuple[str, ...]
    faults: tuple[Fault, ...]
    is_small: bool = False
    """The machines are near one another and have little memory. None has room for the whole model,
    few layers are held twice, and guardians keep up with each step."""
    is_crowd: bool = False
    """So many join that all lines are thin: these are soon measured."""
    roomy: tuple[str, ...] = ()
    """Machines that have room for the whole model all the same."""
    is_quick: bool = False
    """The run is short, unless `is_long`."""
    is_long: bool = False
    """The run has as many steps as others, and some are left long after all is mended."""
    waits_for_a_step: bool = False
    """Faults begin after the first step, not after the daemons did."""
    rooms_are_tight: bool = False
    """The small model fills what only large models fill elsewhere: `surroundings.tight_rooms`."""
    goes_rarer_ways: bool = False
    """Daemons go rare ways all the time: `surroundings.rarer`."""
    is_calm: bool = False
    """Each fault, or two at a time, waits until the one before is over and a step has committed
    since. So no next fault helps a peer that is stuck."""
    is_slow: bool = False
    """Machines compute so slowly that a peer that is away for a minute misses only a part of the
    run. Once all is mended, no peer stays out of the others' view."""
    goes_on_after_the_end: bool = False
    """Faults that are not over with the last step begin all the same."""
    stays_resident: bool = False
    """A daemon that its owner pauses comes back in the same process."""
    writes_samples: bool = False
    """The model writes samples as it learns."""
    is_watched: bool = False
    """Somebody asks every daemon all that it tells, again and again."""
    is_compared: bool = False
    """What daemons tell their users is compared with the truth: `seeds.told`."""
    is_audited: bool = False
    """Others compute work again before a step commits."""
    is_narrow: bool = False
    """Links are so slow that a peer may well die in the middle of a transfer."""
    lanes_are_apart: bool = False
    """What is sent over one lane says nothing of when it comes over another one."""
    model: str = ""
    """The model that is trained: `run.MODELS`; empty: the plain one."""
    is_invited: bool = False
    """Joiners show a line of the founder's."""
    is_private: bool = False
    """All that begin but the last one are named: they alone may have ends and data."""
    behind: tuple[str, ...] = ()
    """Peers behind a router: nobody can call them."""
    liars: tuple[str, ...] = ()
    """Peers that ever lie: a quarter of those that begin, at most."""
    lie_together: bool = False
    """Each liar finds the others' work right, and says so."""
    audit_rate: float = 0.5
    """The share of works that are audited, where any are."""

    @property
    def callable_first(self) -> tuple[str, ...]:
        """Peers whose addresses are given to those that begin after them."""
        return tuple(name for name in self.begun if name not in self.behind)

    @property
    def has_only_crashes(self) -> bool:
        """Only the dead and sleepers are out of reach."""
        return all(fault.kind in CRASHES for fault in self.faults)

    @property
    def has_sleepers(self) -> bool:
        return any(fault.kind == "lid" for fault in self.faults)

    @property
    def lies(self) -> list[tuple[str, str]]:
        """Names of liars, and in what they lie."""
        return [(name, fault.what) for fault in self.faults if fault.what for name in fault.whom]

    @property
    def send_damaged(self) -> set[str]:
        """Peers whose bytes are changed before they are sent."""
        return {fault.whom[0] for fault in self.faults if fault.kind == "damaged bytes"}

    def only(self, kept: frozenset[int]) -> "Schedule":
        """The schedule with only these of its faults, by their place."""
        faults = tuple(fault for place, fault in enumerate(self.faults) if place in kept)
        return replace(self, faults=faults)
