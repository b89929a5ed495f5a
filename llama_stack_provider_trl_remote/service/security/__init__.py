"""Who calls, what they may, how much, and the audit log of it."""
