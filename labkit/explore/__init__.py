"""Memory as choices are changed, in JupyterLab: `from labkit.explore import Explorer; Explorer()`."""

from labkit.explore.explorer import Explorer

__all__ = ["Explorer"]
