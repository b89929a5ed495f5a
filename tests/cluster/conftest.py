from __future__ import annotations

from tests.cluster.bed import bed

__all__ = ["bed"]
