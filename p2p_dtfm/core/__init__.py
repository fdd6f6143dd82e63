"""Pure and deterministic: records, agreement, planning, steps. Events in, actions out."""
