"""The kinds of lies that `p2p-dtfm chaos --lie` plays, and what the design promises of each.

A run is judged by its kind's promise: also where that is that nobody finds the lie out. What the
liars do is in the files beside this one; `daemon` puts it into the program.
"""

from typing import NamedTuple

from p2p_dtfm.testbed.lies.gradients import GRADIENT_LIES

FIRST_LIE = 5
WITHIN_STEPS = 2
CONFESSES_AFTER = 10
"""Steps in which it has lied."""


class Promise(NamedTuple):
    """With audits of all works. `text` ends "the design promises that the liar is"."""

    text: str
    within: int | None
    """In which of its lying steps it is out at the latest; None: it need not be."""
    barred: bool = False
    spoils: str = ""
    """What is wrong afterwards, and nobody knows; nothing, where all works are audited."""
    costs_another: bool = False
    """An honest one may lose its place for a while."""


class Kind(NamedTuple):
    """One way to lie."""

    what: str
    promise: Promise
    strength: float | None = None
    """Unless another is asked for; None: it has none."""
    from_step: int = FIRST_LIE
    rate: float = 1.0
    """Of audits, unless another is asked for."""
    newcomer: bool = False
    """Somebody comes while it is told."""
    pipelines: bool = False
    """Of two stages: nobody has the whole model."""


BARRED = Promise("out within two steps, and barred", WITHIN_STEPS, barred=True)
LEFT_OUT = Promise(
    "out within two steps, and back after 10, 20, 40, 80 seconds: nobody can prove it to those "
    "that were not there",
    WITHIN_STEPS,
)
LEFT_OUT_OF_SIX = Promise(
    "out within two steps, and back after 10, 20, 40, 80 seconds: three of six can compute its "
    "work, and these are not more than half",
    WITHIN_STEPS,
)
ONE_OF_TWO = Promise(
    "in doubt with who stands beside it: one of the two is out, and it may be the honest one",
    None,
    costs_another=True,
)
ONLY_TIME = Promise("not found out by anybody, and costs nothing but time", None)
BELIEVED = Promise(
    "not found out: what it says is believed", None, spoils="the held-out losses that all show"
)

_GRADIENTS = {
    "zeros": Kind("sends no gradients: zeros", BARRED),
    "flip": Kind(
        "points its gradients the other way; by 0.1 they have 0.8 of their size", BARRED, 1.0
    ),
    "scale": Kind("makes its gradients larger by so many times", BARRED, 1.0),
    "noise": Kind("adds so many times as much noise as there is gradient", BARRED, 1.0),
    "bend": Kind("adds so many times 1e-4 to one in a thousand elements", BARRED, 1.0),
    "replay": Kind("gives the gradients of its first step as a liar again and again", BARRED),
}
assert _GRADIENTS.keys() == GRADIENT_LIES.keys()

_WORK = {
    "tokens": Kind("trains on other tokens than its share's", BARRED),
    "skipped": Kind("leaves out its last microbatch", BARRED),
    "activation": Kind("sends the next stage other activations", LEFT_OUT_OF_SIX, pipelines=True),
    "edge-out": Kind(
        "claims other tensors than it has sent its neighbours", LEFT_OUT_OF_SIX, pipelines=True
    ),
    "edge-in": Kind(
        "claims that other tensors came from its neighbours", ONE_OF_TWO, pipelines=True
    ),
}
_SUMS = {
    "sum": Kind("makes its sums larger by so many times, and tells all the same", BARRED, 1.0),
    "part": Kind("sends other gradients than it claims", LEFT_OUT),
    "unlike-sums": Kind("gives each other holder another sum", LEFT_OUT),
    "nan": Kind("sends gradients that are no numbers", LEFT_OUT),
    "withheld": Kind(
        "withholds its gradients from so large a part of the others, and says that it has sent "
        "them",
        Promise(
            "out when the others have waited for some seconds, and back after 10, 20, 40, 80", 1
        ),
        1.0,
    ),
    "unshown": Kind("shows nobody what an audit asks it for", LEFT_OUT),
}
_WORDS = {
    "norm": Kind("says that the norm is larger by so many times", LEFT_OUT, 1.0),
    "unlike-norms": Kind("tells each member another norm", BARRED),
    "loss": Kind("says that its loss is larger by so many times", BARRED, 1.0),
    "held-out": Kind(
        "says that its held-out loss is larger by so many times", BELIEVED, 1.0, from_step=10
    ),
    "count": Kind("counts twice the tokens that it has computed", LEFT_OUT),
    "digest": Kind("says that its states are others than they are", LEFT_OUT, from_step=20),
    "lineage": Kind("says that it starts the step from another state", LEFT_OUT),
    "opening": Kind("opens something else than it was committed to", LEFT_OUT),
    "alien": Kind("flips its gradients, and calls its arithmetic one of its own", LEFT_OUT),
    "mute": Kind("flips its gradients, and says no Prepared once an auditor has found it", BARRED),
    "confess": Kind(
        "flips its gradients for ten steps, then proves that it lies, to have others undo them",
        Promise(
            "out and barred when it confesses; its wrong steps that nobody drew stay, and none is "
            "undone",
            CONFESSES_AFTER + WITHIN_STEPS,
            barred=True,
            spoils="the steps in which it lied",
        ),
        rate=0.02,
    ),
}
_OF_OTHERS = {
    "accuse": Kind("finds fault with whomever it is drawn to audit", BARRED),
    "lazy": Kind(
        "audits nothing: says of whomever it is drawn to audit that all is as claimed",
        Promise("not found out: it harms where it is drawn for another liar", None),
    ),
    "silence": Kind(
        "accuses all others of silence, again and again",
        Promise(
            "out once it has cost others their places: one of them twice at most",
            None,
            costs_another=True,
        ),
    ),
}
_OF_ITSELF = {
    "speed": Kind(
        "says that it computes so many times as fast as it does", ONLY_TIME, 10.0, from_step=0
    ),
    "links": Kind(
        "says that its lines carry so many times what they do", ONLY_TIME, 1e-3, from_step=0
    ),
    "state": Kind(
        "gives a newcomer noise in place of states",
        Promise("not left out; the newcomer takes the states from another one", None),
        from_step=0,
        newcomer=True,
    ),
}
KINDS: dict[str, Kind] = {**_GRADIENTS, **_WORK, **_SUMS, **_WORDS, **_OF_OTHERS, **_OF_ITSELF}
WITH_STRENGTH = tuple(name for name, kind in KINDS.items() if kind.strength is not None)
