"""Matched studies: what is asked, where the answers lie, how they are made, what they say."""

from labkit.study.study import Study

__all__ = ["Study"]
