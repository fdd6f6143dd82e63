"""What shows others what was done here: the transcript in a home, and a sample of its work computed
again."""
