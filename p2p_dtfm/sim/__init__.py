"""Virtual time: core's own state machines for many peers, and the step-time simulator."""
