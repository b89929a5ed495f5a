"""Install into this interpreter's environment with uv, from where pip would: pip's configuration becomes uv's.

    .venv/bin/python scripts/uv_install.py [arguments of `uv pip install`]

uv reads neither pip's files nor its PIP_* variables. A setting without a counterpart in uv ends this with status 3,
before anything is installed: the caller then uses pip.
"""

import ast
import os
import subprocess
import sys
from pathlib import Path

SECTIONS = ("global", "install", ":env:")
"""pip's order: a later one replaces the setting of an earlier one."""
WITHOUT_EFFECT = {
    *(
        "cache-dir",
        "config-file",
        "disable-pip-version-check",
        "log",
        "no-color",
        "no-input",
        "no-warn-script-location",
    ),
    *("progress-bar", "quiet", "require-virtualenv", "retries", "root-user-action", "verbose"),
}
"""Settings of pip that do not decide what is installed, nor from where."""
ARGUMENTS = {
    "find-links": "--find-links",
    "constraint": "--constraint",
    "trusted-host": "--allow-insecure-host",
}
VARIABLES = {
    **{"index-url": "UV_DEFAULT_INDEX", "extra-index-url": "UV_INDEX"},
    **{"cert": "SSL_CERT_FILE", "timeout": "UV_HTTP_TIMEOUT", "default-timeout": "UV_HTTP_TIMEOUT"},
}
"""Every user of the machine can read the arguments of a process, and an index's URL may hold a password."""
KEPT = ("UV_CACHE_DIR",)
"""Variables of uv that a user may set; others decide what is installed, and from where."""
LOUD = ["--verbose"] * 3
"""With pip's own setting `quiet`, at most 3, it would list nothing."""


class NoCounterpart(ValueError):
    """pip has a setting that uv cannot be given."""


def settings(listing: str) -> dict[str, str]:
    """The settings of `pip install`, from the output of `pip config list`: `section.name='value'` lines."""
    found: dict[str, dict[str, str]] = {section: {} for section in SECTIONS}
    for line in listing.splitlines():
        key, _, value = line.partition("=")
        section, _, name = key.rpartition(".")
        if section in found and (set_to := ast.literal_eval(value)):  # pip ignores empty ones
            found[section][name.lower().replace("_", "-")] = set_to
    return {name: value for section in SECTIONS for name, value in found[section].items()}


def translate(listing: str) -> tuple[list[str], dict[str, str]]:
    """Arguments and environment variables with which uv installs as a pip with this configuration.

    Raises:
        NoCounterpart: a setting has neither a counterpart nor a place among those without effect.
    """
    arguments, variables = [], {}
    for name, value in settings(listing).items():
        if name in ARGUMENTS:
            arguments += [word for part in value.split() for word in (ARGUMENTS[name], part)]
        elif name in VARIABLES:
            variables[VARIABLES[name]] = value if name == "cert" else " ".join(value.split())
        elif name in ("no-index", "no-cache-dir"):
            if value.lower() not in ("0", "false", "no", "off", ""):
                arguments.append("--no-index" if name == "no-index" else "--no-cache")
        elif name not in WITHOUT_EFFECT:
            raise NoCounterpart(f"pip's setting {name} has no counterpart in uv")
    return arguments, variables


def cache(environment: Path, uv: list[str]) -> list[str]:
    """uv links files out of its cache; one on another disk would hold 5 GB beside those of the environment."""
    listed = subprocess.run([*uv, "cache", "dir", "--no-config"], capture_output=True, text=True, check=True)
    shared = Path(listed.stdout.strip())
    while not shared.exists():
        shared = shared.parent
    return [] if shared.stat().st_dev == environment.stat().st_dev else ["--no-cache"]


def main() -> None:
    environment = Path(sys.prefix)
    uv = [str(environment / "bin" / "uv")]
    listing = subprocess.run(
        [sys.executable, "-m", "pip", *LOUD, "--disable-pip-version-check", "config", "list"],
        capture_output=True,
        text=True,
        check=True,
    )
    try:
        arguments, variables = translate(listing.stdout)
    except NoCounterpart as error:
        print(error, file=sys.stderr)
        sys.exit(3)
    # pip takes the best version of all indexes; uv by default that of the first one which has the package.
    common = ["--no-config", "--python", sys.executable, "--index-strategy", "unsafe-best-match"]
    command = [*uv, "pip", "install", *common, *cache(environment, uv), *arguments, *sys.argv[1:]]
    for name in [name for name in os.environ if name.startswith("UV_") and name not in KEPT]:
        del os.environ[name]
    os.environ.update(variables)
    if "--no-cache" in command:
        os.environ["TMPDIR"] = str(environment)  # what is unpacked here can be linked, on another disk it is copied
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
