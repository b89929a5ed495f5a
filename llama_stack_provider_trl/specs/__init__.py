"""The frozen contract between processes: jobs, events, rows, evaluations, checkpoint files. Imports no torch."""
