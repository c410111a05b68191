"""What a rule says: `Finding`."""

from typing import Literal, NamedTuple


class Finding(NamedTuple):
    """One broken rule (`error`) or idle choice (`warning`)."""

    severity: Literal["error", "warning"]
    field: str
    """Dotted path of the field in the workload."""
    reason: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.field}: {self.reason}; {self.remedy}"
