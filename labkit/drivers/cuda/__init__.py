"""The driver that measures on GPUs: a fresh process group for each cell, started by torchrun.

`driver.py` is the caller's side and imports no torch; `launch.py` is torchrun under a watch; `__main__.py` and
`rank.py` are what each rank runs, on the `device.py` it is given; `report.py` is what a rank says, `faults.py` what its
errors mean; `machine.py` is what this machine has; `runs.py` shows what came of it.
"""
