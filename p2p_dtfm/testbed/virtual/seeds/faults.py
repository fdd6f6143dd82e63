"""What is to happen in a seed: how many daemons there are, and what is done to them when."""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from p2p_dtfm.testbed.virtual.lies.lying import KINDS as KINDS_OF_LIES
from p2p_dtfm.testbed.virtual.lies.lying import SELDOM_TOLD

NAMES = "abcdefghijkl"
BEGUN = (3, 5)
JOINERS = (0, 3)
FAULTS = (12, 16)
AUDITS = 3
"""Of eight seeds that one, in which work is computed again before a step commits."""
RESIDENTS = 6
"""Of eight seeds that one, in which who is paused by its owner stays in the same process."""
OUTAGES = 4
"""Of eight seeds that one, in which all lose power at once, and some come back first."""
INVITED = 0
"""Of sixteen seeds that one, in which the run lets in only who shows an invitation."""
PRIVATE = 9
"""Of sixteen seeds that one, in which small machines leave both ends, and the data, to some."""
FORGETFUL = 7
"""Of sixteen seeds that one, in which the founder's home loses whom it has met in the run."""
SWIZZLED = 10
"""Of sixteen seeds that one, in which some are cut off from all others one after the other, and
come back in another order."""
DAMAGED = (5, 12)
"""Of sixteen seeds those, with small machines and with large ones, in which some machines change a
word of some of what they send over streams."""
DAMAGED_TIMES = 3
NARROW = 15
"""Of sixteen seeds that one, in which states and gradients take long on all links."""
GIVEN, ADAPTERS = 5, 13
"""Of sixteen seeds those of small machines, in which the model starts from given weights: with a
head that is its embedding, and frozen under adapters."""
FIRST_S, LAST_S = 3.0, 26.0
"""After the last of those that begin the run was started."""
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
}
"""How often each is drawn; each newcomer joins once, and some seeds have the last four."""
CRASHES = {
    "kill": 6,
    "power cut": 3,
    "full disk": 2,
    "slow disk": 1,
    "clock": 2,
    "join": 0,
    "lost memory": 0,
}
"""In every fourth seed only these: in it what is told to be safe is held to its word."""
OF_LINKS = frozenset({"cut", "one-way cut", "slow link", "lossy link", "doubled calls"})


STORMS = 100_000
"""From this seed on: eight small machines, and nothing but kills, one upon the other."""
STORM_OF = "abcdefgh"
KILLED_EVERY_S = (0.8, 3.0)
BACK_AFTER_S = (0.3, 2.0)

LIES = 200_000
"""From this seed on: a quarter of the members lie, in a run with audits; in every other one
machines crash besides, and owners take theirs back."""
BEGUN_WITH_LIARS = (4, 4, 5, 6, 8)
RATES = (1.0, 0.5)
LIES_LAST_S = (1.0, 3.0, math.inf)
"""The last one: it never ends."""
FIRST_LIE_S, LAST_LIE_S, LAST_WITH_LIES_S = 1.0, 4.0, 8.0
"""Their runs are short."""
LIES_IN_STAGES = 400_000
"""From this seed on: one of six or seven small machines lies."""
BEGUN_IN_STAGES = (6, 7)
KINDS_IN_STAGES = ("activation", "edge-out", "parameters", "flip", "sum", "loss")
RECIPES = 300_000
"""From this seed on: the schedules of the first seeds, in runs that are trained otherwise."""
RECIPE_NAMES = ("muon", "local", "signs", "sparse", "int8")
"""`run.RECIPES` has them."""
QUICK = 500_000
"""From this seed on: the schedules of the first seeds, in short runs, with their faults sooner one
after the other: what a seed costs are mostly its steps."""
QUICK_FIRST_S, QUICK_LAST_S = 2.0, 14.0
QUICK_LAST_STEP = 11
"""Of 16: what is to be done in a quick seed begins by its time, or with a step where steps come
faster than that; else the run would be at its end."""
QUICK_FOUNDING = 0.25
"""In so many of the quick seeds faults begin as daemons do, which meet then, and agree on their
first view; in the others with the first step, or all would be done before one."""
QUICK_LASTS = 0.5
"""So much of the time that it would: a seed costs nearly as much for each second as for a step."""
BESIDES_QUICK = 4
"""More faults: of some nothing comes, as whom they are done to is dead, or the run at its end."""
QUICK_SAMPLES_EVERY = 64
"""What the model writes takes long: not one of eight seeds, but one of so many."""
QUICK_LIES = 600_000
"""From this seed on: the schedules of the seeds from 200000 on, on links that take few probes."""
BESIDE_LIES = {"kill": 3, "power cut": 1, "pause": 2, "leave": 2, "slow disk": 1, "clock": 1}
BESIDE_LIES_COUNT = (2, 4)


@dataclass(frozen=True)
class Fault:
    """Begins `at_s` after all that begin the run were started, and ends after a while."""

    at_s: float
    lasts_s: float
    kind: str
    whom: tuple[str, ...]
    """Those to whom it is done: one, the two ends of a link, one side of a partition, or
    who comes back first."""
    draw: float
    """Between 0 and 1: how far, where that is asked."""
    what: str = ""
    """Of lies: in what."""
    at_step: int | None = None
    """It begins sooner if so many steps are committed."""

    def __str__(self) -> str:
        return f"{self.kind} {'-'.join(self.whom)}{self.what and f' ({self.what})'}"


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
    """The run is short."""
    waits_for_a_step: bool = False
    """Faults begin after the first step, not after the daemons did."""
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
    model: str = ""
    """Which one is trained: `run.MODELS`; empty: the plain one."""
    is_invited: bool = False
    """Whoever joins shows a line of the founder's."""
    is_private: bool = False
    """All that begin but the last one are named as those that alone may have ends and data."""
    liars: tuple[str, ...] = ()
    """Who ever lies: a quarter of those that begin, at most."""
    lie_together: bool = False
    """Each finds the others' work right, and says so."""
    audit_rate: float = 0.5
    """Where it is audited."""

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


def draw(seed: int) -> Schedule:
    """The same for the same seed."""
    others = (
        (QUICK_LIES, _quick_lies),
        (QUICK, _quick),
        (LIES_IN_STAGES, _lies_in_stages),
        (RECIPES, _otherwise),
        (LIES, _lies),
        (STORMS, _storm),
    )
    for first, other in others:
        if seed >= first:
            return other(seed)
    draws = random.Random(f"faults {seed}")
    kinds = CRASHES if seed % 4 == 3 else KINDS
    count, joiner_count = draws.randint(*BEGUN), draws.randint(*JOINERS)
    begun, joiners = NAMES[:count], NAMES[count : count + joiner_count]
    faults = [Fault(draws.uniform(FIRST_S, LAST_S), 0.0, "join", (name,), 0.0) for name in joiners]
    for _ in range(draws.randint(*FAULTS)):
        faults.append(_any_fault(draws, kinds, begun, joiners))
    if seed % 8 == OUTAGES:
        faults.append(_outage(seed, begun))
    if seed % 8 == RESIDENTS and all(fault.kind != "leave" for fault in faults):
        faults.append(_leave(seed, begun))
    if seed % 16 == FORGETFUL:
        at_s = random.Random(f"memory {seed}").uniform(FIRST_S, LAST_S)
        faults.append(Fault(at_s, 1.0, "lost memory", (begun[0],), 0.0))
    if seed % 16 == SWIZZLED:
        faults += _swizzle(seed, begun)
    if seed % 16 in DAMAGED:
        faults += _faulty_memory(seed, begun)
    faults.sort(key=lambda fault: fault.at_s)
    return Schedule(
        tuple(begun),
        tuple(joiners),
        tuple(faults),
        is_small=seed % 4 == 1,
        stays_resident=seed % 8 == RESIDENTS,
        writes_samples=seed % 8 == 2,
        is_watched=seed % 8 == 7,
        is_audited=seed % 8 == AUDITS,
        is_narrow=seed % 16 == NARROW,
        model={GIVEN: "given", ADAPTERS: "adapters"}.get(seed % 16, ""),
        is_invited=seed % 16 == INVITED,
        is_private=seed % 16 == PRIVATE,
    )


def _any_fault(
    draws: random.Random, kinds: Mapping[str, int], begun: Sequence[str], joiners: Sequence[str]
) -> Fault:
    kind = draws.choices(list(kinds), list(kinds.values()))[0]
    whom = tuple(draws.sample([*begun, *joiners], 2 if kind in OF_LINKS else 1))
    if kind == "partition":
        whom = tuple(sorted(draws.sample(begun, draws.randint(1, len(begun) - 1))))
    lasts_s = draws.choice(LASTING_S) * draws.uniform(0.5, 1.5)
    at_s = draws.uniform(FIRST_S, LAST_S)
    return Fault(at_s, lasts_s, kind, whom, draws.random())


def _faulty_memory(seed: int, begun: Sequence[str]) -> list[Fault]:
    draws = random.Random(f"damaged {seed}")
    return [
        Fault(
            draws.uniform(FIRST_S, LAST_S),
            draws.choice(LASTING_S),
            "damaged bytes",
            (draws.choice(begun),),
            0.0,
        )
        for _ in range(DAMAGED_TIMES)
    ]


def _otherwise(seed: int) -> Schedule:
    """Differences of local steps take memory, and nobody audits what is rounded: all machines have
    room for the whole model, and what needs little memory or audits is left to other seeds."""
    name = RECIPE_NAMES[seed % len(RECIPE_NAMES)]
    return replace(
        draw(seed - RECIPES), model=name, is_small=False, is_audited=False, is_private=False
    )


def _quick(seed: int) -> Schedule:
    """The same faults, each half as long, and some more; and more of them begin before the run
    ends: of the first seeds one in five comes to fewer than ten."""
    place = seed - QUICK
    plain, draws = draw(place), random.Random(f"quick {seed}")
    kinds = CRASHES if place % 4 == 3 else KINDS
    more = [_any_fault(draws, kinds, plain.begun, plain.joiners) for _ in range(BESIDES_QUICK)]
    faults = [_sooner(fault) for fault in (*plain.faults, *more)]
    faults.sort(key=lambda fault: fault.at_s)
    waits = random.Random(f"founding {seed}").random() >= QUICK_FOUNDING
    writes_samples = plain.writes_samples and place % QUICK_SAMPLES_EVERY == 2
    return replace(
        plain,
        faults=tuple(faults),
        is_quick=True,
        waits_for_a_step=waits,
        writes_samples=writes_samples,
    )


def _sooner(fault: Fault) -> Fault:
    """Of those who are cut off in turns none may be back too soon: they begin by their time."""
    share = (fault.at_s - FIRST_S) / (LAST_S - FIRST_S)
    return replace(
        fault,
        at_s=QUICK_FIRST_S + share * (QUICK_LAST_S - QUICK_FIRST_S),
        lasts_s=fault.lasts_s * QUICK_LASTS,
        at_step=1 + int(share * (QUICK_LAST_STEP - 1)) if fault.kind != "swizzle" else None,
    )


def _quick_lies(seed: int) -> Schedule:
    return replace(_lies(seed - QUICK_LIES + LIES), is_quick=True)


def _storm(seed: int) -> Schedule:
    """The places of the dead are taken by replicas and spares, again and again, in mid-step."""
    draws = random.Random(f"storm {seed}")
    faults, at_s = list[Fault](), FIRST_S
    while (at_s := at_s + draws.uniform(*KILLED_EVERY_S)) < LAST_S:
        whom, lasts_s = draws.choice(STORM_OF), draws.uniform(*BACK_AFTER_S)
        faults.append(Fault(at_s, lasts_s, "kill", (whom,), draws.random()))
    return Schedule(tuple(STORM_OF), (), tuple(faults), is_small=draws.random() < 0.7)


def _lies(seed: int) -> Schedule:
    """Those that begin have the whole model each, and so has who comes: with fewer than three that
    can compute a work again nothing is promised."""
    draws = random.Random(f"lies {seed}")
    count, joiner_count = draws.choice(BEGUN_WITH_LIARS), draws.randint(0, 2)
    begun, joiners = NAMES[:count], NAMES[count : count + joiner_count]
    liars, together = tuple(sorted(draws.sample(begun, count // 4))), draws.random() < 0.5
    faults = [
        Fault(draws.uniform(FIRST_LIE_S, LAST_WITH_LIES_S), 0.0, "join", (name,), 0.0)
        for name in joiners
    ]
    for whom in [liars] if together else [(name,) for name in liars]:
        kinds = set[str]()
        for _ in range(draws.randint(1, 2)):
            at_s, lasts_s = draws.uniform(FIRST_LIE_S, LAST_LIE_S), draws.choice(LIES_LAST_S)
            faults.append(Fault(at_s, lasts_s, "lie", whom, 0.0, draws.choice(KINDS_OF_LIES)))
            kinds.add(faults[-1].what)
        if kinds <= SELDOM_TOLD:
            faults.append(_another_lie(seed, whom))
    for _ in range(draws.randint(*BESIDE_LIES_COUNT) if seed % 2 else 0):
        kind = draws.choices(list(BESIDE_LIES), list(BESIDE_LIES.values()))[0]
        lasts_s = draws.choice(LASTING_S) * draws.uniform(0.5, 1.5)
        at_s, whom = draws.uniform(FIRST_LIE_S, LAST_WITH_LIES_S), (draws.choice(begun + joiners),)
        faults.append(Fault(at_s, lasts_s, kind, whom, draws.random()))
    faults.sort(key=lambda fault: fault.at_s)
    return Schedule(
        tuple(begun),
        tuple(joiners),
        tuple(faults),
        is_audited=True,
        liars=liars,
        lie_together=together,
        audit_rate=draws.choice(RATES),
    )


def _lies_in_stages(seed: int) -> Schedule:
    """One of six or seven lies, and none of them has room for the whole model: members of other
    stages judge as well. Two liars would be most of a stage's three holders, whose norms and states
    are their word."""
    draws = random.Random(f"lies in stages {seed}")
    plain = _lies(seed - LIES_IN_STAGES + LIES)
    count = draws.choice(BEGUN_IN_STAGES)
    begun, liar = tuple(NAMES[:count]), draws.choice(NAMES[:count])
    joiners = tuple(NAMES[count : count + len(plain.joiners)])
    renamed = dict(zip(plain.joiners, joiners, strict=True))

    def of_these(fault: Fault) -> Fault:
        if fault.kind == "lie":
            what = draws.choice(KINDS_IN_STAGES) if draws.random() < 0.5 else fault.what
            return replace(fault, whom=(liar,), what=what)
        whom = fault.whom[0]
        return replace(fault, whom=(renamed.get(whom, draws.choice(begun)),))

    return replace(
        plain,
        begun=begun,
        joiners=joiners,
        faults=tuple(map(of_these, plain.faults)),
        is_small=True,
        liars=(liar,),
        lie_together=False,
    )


def _another_lie(seed: int, whom: tuple[str, ...]) -> Fault:
    """One that is told in any case; it is the first, and over when it was told."""
    draws = random.Random(f"another lie {seed} {whom}")
    what = draws.choice([kind for kind in KINDS_OF_LIES if kind not in SELDOM_TOLD])
    return Fault(FIRST_LIE_S / 2, FIRST_LIE_S / 4, "lie", whom, 0.0, what)


def _outage(seed: int, begun: str) -> Fault:
    """Who comes back first are some of those that began; the others stay away until all is
    mended, unless another fault's end brings them back."""
    draws = random.Random(f"outage {seed}")
    first = tuple(draws.sample(begun, draws.randint(1, len(begun))))
    lasts_s = draws.choice(LASTING_S) * draws.uniform(0.5, 1.5)
    return Fault(draws.uniform(FIRST_S, LAST_S), lasts_s, "outage", first, draws.random())


def _leave(seed: int, begun: str) -> Fault:
    """Who stays resident shows nothing where nobody is paused."""
    draws = random.Random(f"leave {seed}")
    lasts_s = draws.choice(LASTING_S) * draws.uniform(0.5, 1.5)
    at_s, whom = draws.uniform(FIRST_S, LAST_S), draws.choice(begun)
    return Fault(at_s, lasts_s, "leave", (whom,), draws.random())


def _swizzle(seed: int, begun: str) -> list[Fault]:
    """One fault for each of those that are cut off. All are before the first comes back."""
    draws = random.Random(f"swizzle {seed}")
    whom = draws.sample(begun, draws.randint(2, len(begun)))
    first_s, apart_s = draws.uniform(FIRST_S, LAST_S), draws.choice(LASTING_S)
    cut_s = sorted(first_s + draws.uniform(0.0, apart_s) for _ in whom)
    back_s = [first_s + apart_s + draws.uniform(0.0, apart_s) for _ in whom]
    if back_s == sorted(back_s):
        back_s.reverse()
    return [
        Fault(at_s, until_s - at_s, "swizzle", (name,), 0.0)
        for name, at_s, until_s in zip(whom, cut_s, back_s, strict=True)
    ]
