"""What is other in some seeds around the daemons, for as long as a seed is played.

invited      the run lets in only who shows a line of the founder's
rarer        daemons go the rarer of two ways again and again
tight_rooms  what large models fill the small one fills, too
"""
