"""Commented files to start from, made of what the models say of their own fields."""

from labkit.starters.study import starter_name, study_starter
from labkit.starters.workload import workload_starter

__all__ = ["starter_name", "study_starter", "workload_starter"]
