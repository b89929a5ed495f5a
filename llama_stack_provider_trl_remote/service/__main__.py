"""`python -m llama_stack_provider_trl_remote.service`: the training service, by default on port 8322."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import get_args

from llama_stack_provider_trl.system.console import complain
from llama_stack_provider_trl.system.logs import LogLevel

from .loading import load_settings
from .settings import SettingsError

_MODULE = "python -m llama_stack_provider_trl_remote.service"


def main(arguments: list[str] | None = None, program: str = _MODULE) -> int:
    """Parse the options and serve. Returns the exit status.

    Args:
        program: what was typed before the options, as the help names it.
    """
    options = _parser(program).parse_args(arguments)
    try:
        settings, config = load_settings(
            options.config,
            host=options.host,
            port=options.port,
            data_dir=options.data_dir,
            insecure=options.insecure or None,
            log_level="debug" if options.verbose else options.log_level,
        )
    except SettingsError as error:
        complain(str(error), "trl-remote serve")
        return 1
    from .server import serve

    return serve(settings, config)


def _parser(program: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=program, description="Serve post-training over HTTP.")
    parser.add_argument("--config", type=Path, help="run_fsdp.yaml; default: TRL_SERVICE_CONFIG, ./run_fsdp.yaml")
    parser.add_argument("--host", help="default: TRL_SERVICE_HOST, the configuration's, 127.0.0.1")
    parser.add_argument("--port", type=int, help="default: TRL_SERVICE_PORT, the configuration's, 8322; 0: any")
    parser.add_argument("--data-dir", type=Path, help="default: TRL_SERVICE_DATA_DIR, the configuration's")
    parser.add_argument("--insecure", action="store_true", help="serve beyond loopback without TLS")
    parser.add_argument("--log-level", choices=get_args(LogLevel), help="default: TRL_SERVICE_LOG_LEVEL, info")
    parser.add_argument("--verbose", action="store_true", help="as --log-level debug")
    return parser


if __name__ == "__main__":
    sys.exit(main())
