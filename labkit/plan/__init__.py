"""What to recompute: every choice that can run, its peak and what its replay costs, and which one to try first.

`space.py` lists the choices, `price.py` prices them, `ranking.py` ranks them, `ways.py` looks for other ways out,
`reasons.py` says why; `advice.py` puts it together, `advised.py` is what comes of it.
"""

from labkit.plan.advice import advise
from labkit.plan.advised import Advice
from labkit.plan.budget import Budget

__all__ = ["Advice", "Budget", "advise"]
