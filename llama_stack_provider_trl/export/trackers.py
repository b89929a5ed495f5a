"""The trackers that there are, by name."""

from __future__ import annotations

from pathlib import Path

from ..requests.trackers import TrackerSettings
from ..system.data_dir import DataDir
from .tracker import Tracker


def make_tracker(name: str, settings: TrackerSettings, data_dir: Path) -> Tracker:
    """The tracker of a name that is configured. Imports its library. Raises ImportError: the library is not
    installed."""
    home = DataDir(data_dir).trackers
    if name == "tensorboard" and settings.tensorboard is not None:
        from .tensorboard import TensorBoard

        return TensorBoard(settings.tensorboard.directory or home / name)
    if name == "mlflow" and settings.mlflow is not None:
        from .mlflow import Mlflow

        return Mlflow(settings.mlflow.uri or f"sqlite:///{home / 'mlflow.sqlite3'}")
    if name == "wandb" and settings.wandb is not None:
        from .wandb import Uploads, Wandb

        online = settings.wandb.mode == "online"
        uploads = Uploads(settings.wandb.uri, settings.wandb.entity) if online else None
        return Wandb(settings.wandb.directory or home / name, uploads)
    if name == "trackio" and settings.trackio is not None:
        from .trackio import Trackio

        return Trackio(settings.trackio.directory or home / name)
    raise ValueError(f"no such tracker is configured: {name}")
