"""Which of two views counts, where parts of a split swarm meet."""

from p2p_dtfm.core.agreement_messages import Standing

LENGTHS_ALIKE = 1
"""Lineages whose lengths differ by no more count as equally long: a step is always under way, and
two parts must not both take the other for the longer one."""


def outranks(one: Standing, other: Standing) -> bool:
    """One that trains before one that cannot, then the longer lineage, then the higher view id."""
    if one.has_plan != other.has_plan:
        return one.has_plan
    if abs(one.step - other.step) > LENGTHS_ALIKE:
        return one.step > other.step
    return one.view > other.view
