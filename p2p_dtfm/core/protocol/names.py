"""What people call a peer: a name that its owner gave, or one made from its identity.

Names are strangers' text, and are shown as text only. All peers refuse the same names, whatever
Unicode tables they have: code points are compared with fixed ranges.
"""

import hashlib
from collections import Counter
from collections.abc import Mapping

GIVEN_NAME_LIMIT = 24
OWN_MARK = "·"
"""Stands before the suffix that tells two peers of one name apart. No given name may hold it."""
SUFFIX_CHARACTERS = 6
_HIDDEN = (
    (0x00, 0x1F), (0x7F, 0x9F), (0xAD, 0xAD), (0x61C, 0x61C), (0x115F, 0x1160), (0x180B, 0x180F),
    (0x200B, 0x200F), (0x2028, 0x202E), (0x2060, 0x206F), (0x3164, 0x3164), (0xD800, 0xF8FF),
    (0xFE00, 0xFE0F), (0xFEFF, 0xFEFF), (0xFFA0, 0xFFA0), (0xFFF0, 0xFFFB), (0xE0000, 0x10FFFF),
)  # fmt: skip
"""Control characters, and those that turn the direction of text, show nothing or mean nothing."""
_ACCENTS = ((0x300, 0x36F), (0x483, 0x489), (0x1AB0, 0x1AFF), (0x1DC0, 0x1DFF), (0x20D0, 0x20FF))
"""Accents, which stand over the letter before. Many on one letter reach into other lines."""


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_ADJECTIVES = _words(
    "able amber apt azure bold brave breezy bright brisk calm candid civil clear clever cosy crisp "
    "curious daring dapper deft eager earnest easy exact fair famous fleet fond frank free fresh "
    "gentle glad golden good grand happy hardy honest humble ideal jolly just keen kind lively "
    "loyal lucky mellow merry mighty mild modest neat nimble noble open patient placid plucky "
    "polite prime proud quick quiet rapid ready regal robust rosy royal silver sincere sleek smart "
    "snug solid spry steady stout sunny super sure swift tidy tough trim true upbeat vivid warm "
    "wise witty young zesty"
)
_ANIMALS = _words(
    "albatross alpaca ant badger bat bear beaver bee bison bobcat camel cat cheetah cobra condor "
    "coral crab crane cricket crow deer dingo dolphin dove dragonfly duck eagle eel elk emu falcon "
    "ferret finch firefly fox frog gazelle gecko gibbon giraffe goat goose gull hamster hare hawk "
    "hedgehog heron hippo horse ibex ibis iguana impala jackal jaguar jay koala kiwi lark lemur "
    "leopard lion llama lobster lynx magpie manatee marmot marten mole moose mouse newt ocelot "
    "octopus orca ostrich otter owl panda parrot pelican penguin pika puffin puma quail rabbit "
    "raven robin salmon seal shark sparrow squid stork swan tapir tern tiger toad toucan trout "
    "turtle viper walrus whale wolf wombat wren yak zebra"
)


def generated_name(peer_id: str) -> str:
    """Two words, always the same for one identity."""
    drawn = int.from_bytes(hashlib.blake2b(peer_id.encode(), digest_size=8).digest(), "big")
    rest, adjective = divmod(drawn, len(_ADJECTIVES))
    return f"{_ADJECTIVES[adjective]}-{_ANIMALS[rest % len(_ANIMALS)]}"


def fault_of_name(name: str) -> str:
    """Why a peer may not have this name; empty if it may."""
    if not name or len(name) > GIVEN_NAME_LIMIT:
        return f"must be of 1 to {GIVEN_NAME_LIMIT} characters"
    if any(_is_in(letter, _HIDDEN) for letter in name):
        return "must be of characters that can be seen"
    if OWN_MARK in name:
        return f"must not hold {OWN_MARK}, which tells peers of one name apart"
    if name != name.strip() or "  " in name:
        return "must neither begin nor end with a space, nor hold two of them together"
    accents = [_is_in(letter, _ACCENTS) for letter in name]
    if any(before and after for before, after in zip([True, *accents], accents, strict=False)):
        return "must have at most one accent over a letter"
    return ""


def distinct(names: Mapping[str, str]) -> dict[str, str]:
    """What to call each peer among the others, by id: peers of like names get the end of their id.
    Names are alike if they differ only in capitals, or in characters that are no letters or digits.
    """
    count = Counter(sounds(name) for name in names.values())
    return {
        peer_id: name if count[sounds(name)] == 1 else marked(name, peer_id)
        for peer_id, name in names.items()
    }


def sounds(name: str) -> str:
    """What is equal in names that people would confuse: lower-case letters and digits."""
    return "".join(letter for letter in name.casefold() if letter.isalnum())


def marked(name: str, peer_id: str) -> str:
    """The name with the end of the peer's id, which tells it from others of its name."""
    return f"{name}{OWN_MARK}{peer_id[-SUFFIX_CHARACTERS:]}"


def _is_in(letter: str, ranges: tuple[tuple[int, int], ...]) -> bool:
    return any(first <= ord(letter) <= last for first, last in ranges)
