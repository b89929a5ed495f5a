"""Words for the states of jobs where people read them: on pages, and in `trl-remote`. The API has its own names."""

from __future__ import annotations

_WORDS = {"scheduled": "waiting", "launching": "starting", "in_progress": "running"}


def state_word(state: str) -> str:
    """The word for a state, or for a status of Llama Stack."""
    return _WORDS.get(str(state), str(state))


def state_of(word: str) -> str:
    """The state that a word, or the state itself, is for."""
    return next((state for state, known in _WORDS.items() if known == word), word)
