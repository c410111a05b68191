"""Why a run died: logs, messages, snapshots and launch arguments read as facts, and facts as causes."""

from labkit.diagnose.diagnose import Examined, diagnose, examine
from labkit.diagnose.diagnosis import Diagnosis, Finding

__all__ = ["Diagnosis", "Examined", "Finding", "diagnose", "examine"]
