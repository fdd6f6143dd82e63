"""Admission by invitation: chains of signatures, who has been let in, and the pasted line."""
