"""Answers chats: which model a name stands for, and the processes that answer for it."""
