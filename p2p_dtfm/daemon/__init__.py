"""The interpreter: turns actions of core into calls on net and train, and back into events."""
