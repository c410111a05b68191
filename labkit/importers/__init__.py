"""From other people's descriptions of a run to a `Workload`."""
