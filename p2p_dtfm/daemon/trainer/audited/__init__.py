"""Audits of a step that take long. Begin with `late_words`."""
