"""The exporter: sends the metric points of the job store to experiment trackers, in a process of its own."""
