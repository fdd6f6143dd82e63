"""Runs by invitation: this peer's own invitation, the peers that it lets in, and invitations that
were taken back."""
