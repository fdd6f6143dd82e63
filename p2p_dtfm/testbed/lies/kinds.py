"""The kinds of lies that `p2p-dtfm chaos --lie` plays, and what the design promises of each.

A run is judged by its kind's promise, even where the promise is that nobody finds the lie out. The
files beside this one have what the liars do; `daemon` puts it into the program.
"""

from typing import NamedTuple

from p2p_dtfm.testbed.lies.gradients import GRADIENT_LIES

FIRST_LIE = 5
WITHIN_STEPS = 2
SELDOM, OFTEN = 0.02, 0.2
EVADES_FOR = 50
"""Steps. At the rate `OFTEN` at least one of them is drawn, as good as always."""
LAYERS, NEXT_STAGE = "layers", "next stage"
EVALUATED_EVERY = 10
CONFESSES_AFTER = 10
"""Steps in which the liar has lied."""


class Promise(NamedTuple):
    """What the design promises if all works are audited. `text` ends "the design promises that the
    liar is"."""

    text: str
    within: int | None
    """In which of its lying steps the liar is out at the latest; None: it need not be."""
    barred: bool = False
    spoils: str = ""
    """What is wrong afterwards, and nobody knows; empty, where all works are audited."""
    costs_another: bool = False
    """An honest member may lose its place for a while."""
    fair_within: int | None = None
    """By which step at the latest steps take nearly as long as without a liar."""


def undone(promise: Promise) -> Promise:
    """The promise in a run that takes back what a barred peer did."""
    if not promise.barred:
        return promise
    text = f"{promise.text.partition(';')[0]}; what it did is undone"
    return promise._replace(text=text, spoils="")


class LieKind(NamedTuple):
    """One way to lie."""

    what: str
    promise: Promise
    strength: float | None = None
    """The usual strength; None: the lie has none."""
    from_step: int = FIRST_LIE
    rate: float = 1.0
    """The usual rate of audits."""
    newcomer: bool = False
    """A newcomer comes while the lie is told."""
    pipelines: bool = False
    """The plan has pipelines of two stages: nobody has the whole model."""
    needs: str = LAYERS
    """What a liar needs for the lie: `LAYERS`, `NEXT_STAGE` or nothing."""
    every: int = 1
    """The lie can be told in one of so many steps."""
    is_paced: bool = False
    """Each daemon takes as long as it would say it takes if nobody lied."""
    steps_after: int = 25
    """How many steps follow the first lie."""


BARRED = Promise("out within two steps, and barred", WITHIN_STEPS, barred=True)
LEFT_OUT = Promise(
    "out within two steps, and back after 10, 20, 40, 80 seconds: nobody can prove it to those "
    "that were not there",
    WITHIN_STEPS,
)
WAITED_FOR = Promise(
    "out when the others have waited for some seconds, and back after 10, 20, 40, 80", 1
)
OUT_OR_BARRED = Promise(
    "out within two steps, and barred, unless who stands beside it claims others as well: then one "
    "of the two is out, and the other the next time",
    WITHIN_STEPS,
)
ODD_ONE = Promise(
    "out within two steps, and back after 10, 20, 40, 80 seconds; of colluders that are half of a "
    "stage's holders one, with an honest one, and where they are most of them it is an honest one",
    WITHIN_STEPS,
    costs_another=True,
)
ONE_OF_TWO = Promise(
    "in doubt with who stands beside it: one of the two is out, and it may be the honest one",
    None,
    costs_another=True,
)
ONCE_DRAWN = Promise(
    "out and barred in the first step in which it is drawn; its wrong steps before stay, unless "
    "the run undoes them",
    EVADES_FOR,
    barred=True,
    spoils="the steps in which it was not drawn",
)
ONCE_DRAWN_EARLY = Promise(
    "out in the first step in which it is drawn, and barred where it alone had not claimed; its "
    "wrong steps before stay, unless the run undoes them",
    EVADES_FOR,
    spoils="the steps in which it was not drawn",
)
LATE_WITHIN = 5
"""Steps. At the rate `OFTEN` at least one of them is not drawn, as good as always."""
SEEN_WITHIN = 25
"""Steps: fifteen seconds of steps, ten in which the others see it, and some until a new plan."""
TAKEN_BACK = Promise(
    f"not left out; within {SEEN_WITHIN} steps the others have seen how fast it is, and it has no "
    "more work than it can do",
    None,
    fair_within=SEEN_WITHIN,
)
NOT_HEARD = Promise("not left out, and not heard: no work is moved", None, fair_within=5)
TELLS_UNLIKE = Promise(
    "out and barred in the first step in which it tells unlike things, whoever of the colluders "
    "does, and no honest one for it",
    None,
)
ONLY_TIME = Promise("not found out by anybody, and costs nothing but time", None)

_GRADIENTS = {
    "zeros": LieKind("sends no gradients: zeros", BARRED),
    "flip": LieKind(
        "points its gradients the other way; by 0.1 they have 0.8 of their size", BARRED, 1.0
    ),
    "scale": LieKind("makes its gradients larger by so many times", BARRED, 1.0),
    "noise": LieKind("adds so many times as much noise as there is gradient", BARRED, 1.0),
    "bend": LieKind("adds so many times 1e-4 to one in a thousand elements", BARRED, 1.0),
    "replay": LieKind("gives the gradients of its first step as a liar again and again", BARRED),
}
assert _GRADIENTS.keys() == GRADIENT_LIES.keys()

_WORK = {
    "tokens": LieKind("trains on other tokens than its share's", BARRED),
    "skipped": LieKind("leaves out its last microbatch", BARRED),
    "activation": LieKind(
        "sends the next stage other activations, and the one before other gradients",
        BARRED,
        pipelines=True,
    ),
    "overflow": LieKind(
        "sends its neighbours finite numbers of which they make what is none",
        ONE_OF_TWO,
        pipelines=True,
    ),
    "edge-out": LieKind(
        "claims other tensors than it has sent its neighbours", OUT_OR_BARRED, pipelines=True
    ),
    "edge-in": LieKind(
        "claims that other tensors came from its neighbours", ONE_OF_TWO, pipelines=True
    ),
    "swapped": LieKind(
        "claims of each microbatch what has come and gone for the next one",
        ONE_OF_TWO,
        pipelines=True,
    ),
    "parameters": LieKind(
        "claims that it began the step with other parameters", ODD_ONE, pipelines=True
    ),
    "update": LieKind(
        "makes its own parameters a thousandth larger at the end of each step", BARRED
    ),
    "evade": LieKind(
        "flips its gradients, and has all agree anew when it is drawn: then it does it rightly",
        ONCE_DRAWN,
        rate=OFTEN,
        steps_after=EVADES_FOR,
    ),
    "evade-early": LieKind(
        "does so before it has said its claim, once it knows the draw from all others'",
        ONCE_DRAWN_EARLY,
        rate=OFTEN,
        steps_after=EVADES_FOR,
    ),
    "chosen-draw": LieKind(
        "flips its gradients in the first step of a view, and opens what has colluders audit it",
        BARRED,
        from_step=0,
    ),
    "late-loss": LieKind(
        "says that its loss is larger by so many times, where it knows from all others' claims "
        "that it is not drawn",
        BARRED._replace(
            text="out and barred in the first step in which it does", within=LATE_WITHIN
        ),
        1.0,
        rate=OFTEN,
    ),
    "told-loss": LieKind(
        "tells that its loss is larger by so many times before the draw, and claims the right one "
        "where it is drawn",
        ONCE_DRAWN,
        1.0,
        rate=OFTEN,
        steps_after=EVADES_FOR,
    ),
    "late-part": LieKind(
        "sends gradients the other way to be added up, and claims last: these, or, where it is "
        "drawn, what it should have sent; then it has all agree anew",
        ONCE_DRAWN,
        rate=OFTEN,
        steps_after=EVADES_FOR,
    ),
    "late-split": LieKind(
        "sends gradients the other way to be added up, and claims last: these, or, where it is "
        "drawn, these and what the right ones come to; then it has all agree anew",
        ONCE_DRAWN,
        rate=OFTEN,
        steps_after=EVADES_FOR,
    ),
    "late-opening": LieKind(
        "flips its gradients, and claims last: where it, or a colluder, is drawn it opens what "
        "draws nobody, which is not what it was committed to",
        ONCE_DRAWN,
        rate=OFTEN,
        steps_after=EVADES_FOR,
    ),
    "late-alien": LieKind(
        "flips its gradients, and claims last: where it is drawn an arithmetic of its own, so that "
        "nobody audits it",
        ONCE_DRAWN,
        rate=OFTEN,
        steps_after=EVADES_FOR,
    ),
    "held-out-sent": LieKind(
        "sends the next stage other activations to be evaluated",
        BARRED,
        from_step=10,
        pipelines=True,
        needs=NEXT_STAGE,
        every=EVALUATED_EVERY,
    ),
}
_SUMS = {
    "sum": LieKind("makes its sums larger by so many times, and tells all the same", BARRED, 1.0),
    "part": LieKind("sends other gradients than it claims", BARRED),
    "evade-sum": LieKind(
        "makes its sums larger by so many times, tells all the same, and has all agree anew where "
        "it is drawn",
        ONCE_DRAWN,
        1.0,
        rate=OFTEN,
        steps_after=EVADES_FOR,
    ),
    "late-sum": LieKind(
        "makes its sums larger by so many times, tells all the same, and claims last: these, or, "
        "where it is drawn, the right ones; then it has all agree anew",
        ONCE_DRAWN,
        1.0,
        rate=OFTEN,
        steps_after=EVADES_FOR,
    ),
    "unlike-sums": LieKind("gives each other holder another sum", BARRED),
    "nan": LieKind("sends gradients that are no numbers", LEFT_OUT),
    "withheld": LieKind(
        "withholds its gradients from so large a part of the others, and says that it has sent "
        "them",
        WAITED_FOR,
        1.0,
    ),
    "unshown": LieKind("shows nobody what an audit asks it for", LEFT_OUT),
    "shown-late": LieKind(
        "shows each part that an audit asks it for, so many seconds late",
        WAITED_FOR._replace(within=WITHIN_STEPS),  # the first step may have time for it
        8.0,
    ),
}
_WORDS = {
    "norm": LieKind("says that the norm is larger by so many times", LEFT_OUT, 1.0),
    "unlike-norms": LieKind("tells each member another norm", BARRED),
    "unlike-vouches": LieKind(
        "says to one member that it is not ready for the next view, and to the others that it is",
        TELLS_UNLIKE,
        from_step=0,
        newcomer=True,
        needs="",
    ),
    "loss": LieKind("says that its loss is larger by so many times", BARRED, 1.0),
    "held-out": LieKind(
        "says that its held-out loss is larger by so many times",
        BARRED,
        1.0,
        from_step=10,
        every=EVALUATED_EVERY,
    ),
    "count": LieKind("counts twice the tokens that it has computed", LEFT_OUT),
    "digest": LieKind("says that its states are others than they are", LEFT_OUT, from_step=20),
    "lineage": LieKind("says that it starts the step from another state", LEFT_OUT),
    "opening": LieKind("opens something else than it was committed to", LEFT_OUT),
    "alien": LieKind("flips its gradients, and calls its arithmetic one of its own", BARRED),
    "false-witness": LieKind(
        "says that it has heard another claim of one of the others than that one has signed",
        LEFT_OUT,
    ),
    "two-faced": LieKind("claims one thing to half of the others, and another to the rest", BARRED),
    "unlike-openings": LieKind(
        "claims the same to all, but opens, or commits itself to, one thing to half of them and "
        "another to the rest: they would draw unlike auditors",
        BARRED,
    ),
    "mute": LieKind(
        "flips its gradients, and says no Prepared once an auditor has found it", BARRED
    ),
    "drip": LieKind(
        "claims honestly, so many seconds after it could, in each step",
        Promise(
            "out after twelve steps where half of their time is seen to go by in waiting for its "
            "word, and else not found out; it costs nothing but time",
            None,
        ),
        2.0,
        needs="",
    ),
    "confess": LieKind(
        "flips its gradients for ten steps, then proves that it lies, to have others undo them",
        Promise(
            "out and barred when it confesses; its wrong steps that nobody drew stay, and none is "
            "undone, unless the run undoes them",
            CONFESSES_AFTER + WITHIN_STEPS,
            barred=True,
            spoils="the steps in which it lied",
        ),
        rate=SELDOM,
    ),
}
_OF_OTHERS = {
    "accuse": LieKind("finds fault with whomever it is drawn to audit", BARRED, needs=""),
    "lazy": LieKind(
        "audits nothing: says of whomever it is drawn to audit that all is as claimed",
        Promise("not found out: it harms where it is drawn for another liar", None),
        needs="",
    ),
    "unlike-audits": LieKind(
        "tells who would audit in its place what it has found, and the others that it could not",
        TELLS_UNLIKE,
        pipelines=True,
        needs="",
    ),
    "whispered-doubt": LieKind(
        "lies in its work where a colluder alone is drawn for it, and that one tells so large a "
        "part of the honest ones, at least one, that it is false, and the others that all is well",
        TELLS_UNLIKE,
        0.1,
        needs="",
        steps_after=EVADES_FOR,
    ),
    "whispered-refusal": LieKind(
        "likewise, and the colluder tells who would audit in its place that it could not, and the "
        "others that all is well",
        TELLS_UNLIKE,
        pipelines=True,
        needs="",
        steps_after=EVADES_FOR,
    ),
    "audits-untold": LieKind(
        "says what its audits come to to all but one",
        ONLY_TIME,
        needs="",
    ),
    "claims-untold": LieKind(
        "says its claim to all but one",
        ONLY_TIME,
        needs="",
    ),
    "claims-denied": LieKind(
        "says that it waits for an honest one's claim, which it has heard, and no Prepared",
        WAITED_FOR,
        needs="",
    ),
    "audits-denied": LieKind(
        "says that it waits for an honest one's audit, which it has heard, and no Prepared",
        WAITED_FOR,
        needs="",
    ),
    "silence": LieKind(
        "accuses all others of silence, again and again",
        Promise(
            "out once it has cost others their places: one of them twice at most",
            None,
            costs_another=True,
        ),
        needs="",
    ),
    "silence-of-one": LieKind(
        "accuses the same one of the others of silence as its colluders do, and then the next one",
        Promise(
            "out when the second one is accused, and soon again whenever it is back; one or two of "
            "the others lose their places for a while",
            None,
            costs_another=True,
        ),
        needs="",
    ),
}
_OF_ITSELF = {
    "speed": LieKind(
        "says that it computes so many times as fast as it does",
        TAKEN_BACK,
        10.0,
        from_step=0,
        rate=SELDOM,
        needs="",
        is_paced=True,
        steps_after=SEEN_WITHIN + 20,
    ),
    "slander": LieKind(
        "says that it has seen all others compute next to nothing",
        NOT_HEARD,
        from_step=0,
        rate=SELDOM,
        needs="",
        is_paced=True,
        steps_after=SEEN_WITHIN + 20,
    ),
    "links": LieKind(
        "says that its lines carry so many times what they do",
        ONLY_TIME,
        1e-3,
        from_step=0,
        needs="",
    ),
    "state": LieKind(
        "gives a newcomer noise in place of states",
        Promise("not left out; the newcomer takes the states from another one", None),
        from_step=0,
        newcomer=True,
        needs="",
    ),
    "followed": LieKind(
        "gives a newcomer, behind a state that is right, other gradients than the others get",
        Promise("not left out; the newcomer finds it in its first step, and asks anew", None),
        from_step=0,
        newcomer=True,
        needs="",
    ),
}
KINDS: dict[str, LieKind] = {**_GRADIENTS, **_WORK, **_SUMS, **_WORDS, **_OF_OTHERS, **_OF_ITSELF}
WITH_STRENGTH = tuple(name for name, kind in KINDS.items() if kind.strength is not None)
