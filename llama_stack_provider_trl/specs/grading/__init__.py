"""Graders: what OpenAI's reinforcement fine-tuning rewards answers by."""
