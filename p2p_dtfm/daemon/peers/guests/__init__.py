"""Runs by invitation: by what this peer came, whom it lets in, and whose invitation is no more."""
