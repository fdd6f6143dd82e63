"""Seeds with all kinds of faults, and the same ones in short runs, or in runs trained otherwise."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

from p2p_dtfm.testbed.virtual.seeds.schedules.first_seeds import (
    DUMB,
    QUICK,
    RARER,
    RECIPES,
)
from p2p_dtfm.testbed.virtual.seeds.schedules.schedule import (
    CRASHES,
    FIRST_S,
    KINDS,
    LAST_S,
    LASTING_S,
    NAMES,
    OF_LINKS,
    Fault,
    Schedule,
)

BEGUN = (3, 5)
JOINERS = (0, 3)
FAULTS = (12, 16)
AUDITS = 3
"""The seed of eight in which work is computed again before a step commits."""
RESIDENTS = 6
"""The seed of eight in which a daemon that its owner pauses stays in the same process."""
OUTAGES = 4
"""The seed of eight in which all lose power at once, and some come back first."""
INVITED = 0
"""The seed of sixteen in which the run lets in only peers that show an invitation."""
PRIVATE = 9
"""The seed of sixteen in which small machines leave both ends, and the data, to some."""
FORGETFUL = 7
"""The seed of sixteen in which the founder's home loses whom it has met in the run."""
SWIZZLED = 10
"""The seed of sixteen in which some are cut off from all others, one after the other, and come back
in another order."""
DAMAGED = (5, 12)
"""The seeds of sixteen, with small and with large machines, in which some machines change a word of
some of what they send over streams."""
DAMAGED_TIMES = 3
BUSY = (1, 14)
"""The seeds of sixteen, with small and with large machines, in which some do other things besides:
all that they compute takes many times as long."""
BUSY_TIMES = 2
APART = (2, 11)
"""The seeds of sixteen in which the lanes and calls between two peers have no order among each
other. Any may be held up while the others go on. In one of the two, machines only crash."""
NARROW = 15
"""The seed of sixteen in which states and gradients take long on all links."""
GIVEN, ADAPTERS = 5, 13
"""The seeds of sixteen, with small machines, in which the model starts from given weights: with a
head that is its embedding, and frozen under adapters."""
RECIPE_NAMES = ("muon", "local", "signs", "sparse", "int8")
"""Names in `run.RECIPES`."""

QUICK_FIRST_S, QUICK_LAST_S = 2.0, 14.0
QUICK_LAST_STEP = 11
"""The last of 16 steps with which a quick seed's faults begin. They begin by their time, or by a
step if steps come sooner: else the run would end before them."""
QUICK_FOUNDING = 0.25
"""The share of quick seeds in which faults begin as the daemons start, meet, and agree on their
first view. In the others they begin with the first step: else all would be over before one."""
QUICK_LASTS = 0.5
"""The share of a fault's usual time: a second of a seed costs nearly as much as a step."""
BESIDES_QUICK = 4
"""How many more faults there are: some do nothing, as their peer is dead or the run at its end."""
DUMB_TIMES = 4
DUMB_FOR_S = (1.0, 12.0)
"""What is asked of p2pd is given up after five seconds."""
QUICK_SAMPLES_EVERY = 64
"""What the model writes takes long: so it writes in one seed of so many, not of eight."""


def ordinary(seed: int) -> Schedule:
    """Three to eight daemons, some of which join on the way."""
    draws = random.Random(f"faults {seed}")
    kinds = CRASHES if seed % 4 == 3 else KINDS
    count, joiner_count = draws.randint(*BEGUN), draws.randint(*JOINERS)
    begun, joiners = NAMES[:count], NAMES[count : count + joiner_count]
    faults = [Fault(draws.uniform(FIRST_S, LAST_S), 0.0, "join", (name,), 0.0) for name in joiners]
    for _ in range(draws.randint(*FAULTS)):
        faults.append(any_fault(draws, kinds, begun, joiners))
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
        faults += _some("damaged bytes", DAMAGED_TIMES, seed, begun)
    if seed % 16 in BUSY:
        faults += _some("busy machine", BUSY_TIMES, seed, begun)
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
        lanes_are_apart=seed % 16 in APART,
        model={GIVEN: "given", ADAPTERS: "adapters"}.get(seed % 16, ""),
        is_invited=seed % 16 == INVITED,
        is_private=seed % 16 == PRIVATE,
    )


def any_fault(
    draws: random.Random, kinds: Mapping[str, int], begun: Sequence[str], joiners: Sequence[str]
) -> Fault:
    kind = draws.choices(list(kinds), list(kinds.values()))[0]
    whom = tuple(draws.sample([*begun, *joiners], 2 if kind in OF_LINKS else 1))
    if kind == "partition":
        whom = tuple(sorted(draws.sample(begun, draws.randint(1, len(begun) - 1))))
    lasts_s = draws.choice(LASTING_S) * draws.uniform(0.5, 1.5)
    at_s = draws.uniform(FIRST_S, LAST_S)
    return Fault(at_s, lasts_s, kind, whom, draws.random())


def _some(kind: str, times: int, seed: int, begun: Sequence[str]) -> list[Fault]:
    """So many faults of a kind, at any time."""
    draws = random.Random(f"{kind.split()[0]} {seed}")
    return [
        Fault(
            draws.uniform(FIRST_S, LAST_S),
            draws.choice(LASTING_S),
            kind,
            (draws.choice(begun),),
            0.0,
        )
        for _ in range(times)
    ]


def otherwise(seed: int) -> Schedule:
    """Differences of local steps take memory, and rounded work is not audited. So all machines have
    room for the whole model. What needs small machines or audits is left to other seeds."""
    name = RECIPE_NAMES[seed % len(RECIPE_NAMES)]
    return replace(
        ordinary(seed - RECIPES), model=name, is_small=False, is_audited=False, is_private=False
    )


def quick(seed: int) -> Schedule:
    """The same faults, each half as long, and some more. More of them begin before the run ends:
    one in five of the first seeds comes to fewer than ten."""
    place = seed - QUICK
    plain, draws = ordinary(place), random.Random(f"quick {seed}")
    kinds = CRASHES if place % 4 == 3 else KINDS
    more = [any_fault(draws, kinds, plain.begun, plain.joiners) for _ in range(BESIDES_QUICK)]
    faults = [sooner(fault) for fault in (*plain.faults, *more)]
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


def dumb(seed: int) -> Schedule:
    """p2pd answers nothing for a while, as where a machine swaps or measures with all its cores. A
    daemon that starts meanwhile finds its own p2pd so."""
    draws = random.Random(f"dumb {seed}")
    plain = quick(seed - DUMB + QUICK)
    names = [*plain.begun, *plain.joiners]
    silent = [
        Fault(
            draws.uniform(QUICK_FIRST_S, QUICK_LAST_S),
            draws.uniform(*DUMB_FOR_S),
            "dumb p2pd",
            (draws.choice(names),),
            draws.random(),
            at_step=draws.randint(1, QUICK_LAST_STEP),
        )
        for _ in range(DUMB_TIMES)
    ]
    faults = sorted((*plain.faults, *silent), key=lambda fault: fault.at_s)
    return replace(plain, faults=tuple(faults))


def rarer(seed: int) -> Schedule:
    """Rare ways happen all the time, until all is mended."""
    return replace(quick(seed - RARER + QUICK), goes_rarer_ways=True)


def sooner(fault: Fault) -> Fault:
    """The fault in a quick seed. Cut-offs in turns begin by their time: nobody may be back too
    soon."""
    share = (fault.at_s - FIRST_S) / (LAST_S - FIRST_S)
    return replace(
        fault,
        at_s=QUICK_FIRST_S + share * (QUICK_LAST_S - QUICK_FIRST_S),
        lasts_s=fault.lasts_s * QUICK_LASTS,
        at_step=1 + int(share * (QUICK_LAST_STEP - 1)) if fault.kind != "swizzle" else None,
    )


def _outage(seed: int, begun: str) -> Fault:
    """The drawn peers come back first. The others stay away until all is mended, unless another
    fault's end brings them back."""
    draws = random.Random(f"outage {seed}")
    first = tuple(draws.sample(begun, draws.randint(1, len(begun))))
    lasts_s = draws.choice(LASTING_S) * draws.uniform(0.5, 1.5)
    return Fault(draws.uniform(FIRST_S, LAST_S), lasts_s, "outage", first, draws.random())


def _leave(seed: int, begun: str) -> Fault:
    """A leave: seeds with residents show nothing if nobody is paused."""
    draws = random.Random(f"leave {seed}")
    lasts_s = draws.choice(LASTING_S) * draws.uniform(0.5, 1.5)
    at_s, whom = draws.uniform(FIRST_S, LAST_S), draws.choice(begun)
    return Fault(at_s, lasts_s, "leave", (whom,), draws.random())


def _swizzle(seed: int, begun: str) -> list[Fault]:
    """One fault for each peer that is cut off. All of them are, before the first comes back."""
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
