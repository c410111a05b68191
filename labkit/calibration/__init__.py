"""How far labkit is from what machines measured: files of measured cells and jobs, each as a workload, and its errors.

`rows.py` checks an H200 file, `cells.py` makes workloads of it, `accuracy.py` compares; `jobs.py` does the same for
Megatron-LM's CI jobs; `kept.py` keeps traces, which take minutes; `known.py` has the reasons for errors that have one.
"""
