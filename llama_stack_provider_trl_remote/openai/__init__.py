"""OpenAI's API for files, fine-tuning jobs and models: a translation of the engine's own calls, with no state of its
own. A file is a dataset, a job is a job, and what a job was called with is in its metadata."""
