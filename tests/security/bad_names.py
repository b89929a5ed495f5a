"""Names that no job, dataset or field may have."""

from __future__ import annotations

BAD = {
    "an escape sequence": "a\x1b[2J",
    "a line break": "a\nb",
    "NUL": "a\x00b",
    "C1": "a\x9bb",
    "bidi": "a\u202eb",
    "a line separator": "a\u2028b",
    "nothing visible": "a\u200bb",
    "half a surrogate pair": "a\ud800b",
    "10,000 characters": "x" * 10_000,
}
