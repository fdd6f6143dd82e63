"""One finding of the doctor."""

from dataclasses import dataclass, field
from enum import StrEnum


class Grade(StrEnum):
    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True)
class Check:
    """One finding. `fix` says what to do about a warning or a failure."""

    name: str
    verdict: Grade
    found: str
    fix: str = ""
    facts: dict[str, object] = field(default_factory=dict)

    def as_json(self) -> dict[str, object]:
        return {
            "name": self.name,
            "verdict": self.verdict,
            "found": self.found,
            "fix": self.fix,
            **self.facts,
        }
