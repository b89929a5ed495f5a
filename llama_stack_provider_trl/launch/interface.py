"""Prints the network interface that has an address: `python -m llama_stack_provider_trl.launch.interface 10.0.0.2`."""

from __future__ import annotations

import sys

from .torchrun import interface_of


def main(arguments: list[str]) -> int:
    try:
        print(interface_of(arguments[0]))
    except (OSError, ValueError) as error:
        print(f"interface: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
