"""The durable record of every job, in one sqlite file."""
