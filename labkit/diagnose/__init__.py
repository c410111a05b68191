"""Why a run died: logs, messages, snapshots and launch arguments read as facts, and facts as causes."""

from labkit.diagnose.diagnose import diagnose
from labkit.diagnose.diagnosis import Diagnosis, Finding

__all__ = ["Diagnosis", "Finding", "diagnose"]
