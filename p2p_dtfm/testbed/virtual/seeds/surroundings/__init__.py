"""What differs around the daemons in some seeds, for as long as a seed is played.

invited        the run lets in only peers that show a line of the founder's
one_processor  the arithmetic has one name on all machines
rarer          daemons go the rarer of two ways again and again
tight_rooms    the small model fills what only large models fill elsewhere
"""
