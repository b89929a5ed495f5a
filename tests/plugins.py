"""Installed packages that add training methods, made without an installer: modules, and the files of a distribution."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path

from llama_stack_provider_trl.specs.custom import GROUP
from tests.tiny import REPOSITORY

EXAMPLE = REPOSITORY / "examples" / "custom_trainer"


def install(
    site: Path, package: str, points: Mapping[str, str], modules: Mapping[str, str] = {}, version: str = "1.0"
) -> None:
    """Put a distribution into a directory of `sys.path`.

    Args:
        points: entry points, name -> `module:object`.
        modules: source by name.
    """
    metadata = site / f"{package.replace('-', '_')}-{version}.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    lines = [f"{name} = {value}" for name, value in points.items()]
    (metadata / "entry_points.txt").write_text("\n".join([f"[{GROUP}]", *lines, ""]))
    for name, source in modules.items():
        (site / f"{name}.py").write_text(source)


def install_example(site: Path) -> None:
    """Install the package of examples/custom_trainer from its own metadata and modules."""
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    install(site, project["name"], project["entry-points"][GROUP], version=project["version"])
    (site / "custom_trainer_example").symlink_to(EXAMPLE / "custom_trainer_example")
