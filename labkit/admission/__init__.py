"""May this micro-batch run? Asked from a training loop, before each one: admit, a split, or a refusal with a remedy.

`requests.py` is what is asked for, `passes.py` prices it, `split.py` spreads it, `decision.py` says what came of it,
`remedies.py` what would work instead, `oom.py` what a later error means (`Decision.explain`).
"""

from labkit.admission.admission import Admission
from labkit.admission.decision import Decision, MicroBatch
from labkit.admission.requests import Request

__all__ = ["Admission", "Decision", "MicroBatch", "Request"]
