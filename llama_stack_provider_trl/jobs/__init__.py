"""The job engine: durable records, transitions, placement, and the supervisor that moves jobs along."""
