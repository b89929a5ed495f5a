"""A worker node: an agent that joins a service and runs its tasks."""
