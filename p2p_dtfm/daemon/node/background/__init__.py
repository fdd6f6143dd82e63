"""What a daemon does all the time beside training, from when it takes part until it ends.

Begin with `background`, which starts all of it; each loop has a file.
"""
