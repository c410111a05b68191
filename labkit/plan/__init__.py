"""What to recompute: every choice that can run, its peak and what its replay costs, and which one to try first.

`space.py` lists the choices, `price.py` prices them, `advice.py` ranks them and says why, `advised.py` is what it says.
"""

from labkit.plan.advice import Budget, advise
from labkit.plan.advised import Advice

__all__ = ["Advice", "Budget", "advise"]
