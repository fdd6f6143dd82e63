"""Daemons in virtual time that lie, and what may come of it. For `seeds` and tests.

lying    who lies now, and what was told and committed
work     other gradients, sums and losses than were computed
words    what is said to others: accusations, states, speed, or nothing
putting  all of it in its place
"""
