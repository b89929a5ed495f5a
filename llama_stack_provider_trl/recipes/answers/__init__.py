"""Answers to prompts, by transformers or vLLM: jobs that generate, and answers that are checked."""
