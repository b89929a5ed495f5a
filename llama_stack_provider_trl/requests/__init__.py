"""Request bodies, provider options, and the resolution of both into a JobSpec."""
