"""Answers chats with one base model and adapters of it: the parts of the program `recipes.serve`."""
