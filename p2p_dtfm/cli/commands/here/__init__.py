"""Commands that change this machine."""
