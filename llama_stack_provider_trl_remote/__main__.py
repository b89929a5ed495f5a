"""`python -m llama_stack_provider_trl_remote` is `trl-remote`."""

from __future__ import annotations

import sys

from .cli.main import main

if __name__ == "__main__":
    sys.exit(main())
