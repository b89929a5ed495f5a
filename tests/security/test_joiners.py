"""Joiners in names: taken where a script or a sequence of emoji needs them, refused where nothing is drawn for them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from llama_stack_provider_trl.specs.names import problem_of_name
from llama_stack_provider_trl.system.console import shown
from llama_stack_provider_trl_remote.service.datasets.blobs import Blobs
from llama_stack_provider_trl_remote.service.datasets.registry import DatasetRegistry
from llama_stack_provider_trl_remote.service.http import dataset_bodies
from llama_stack_provider_trl_remote.service.settings import ServiceSettings


@pytest.mark.parametrize(
    "name",
    [
        "می\u200cخواهم",  # Persian  # noqa: RUF001
        "क्\u200dष और क्\u200cष",  # Hindi
        "ශ්\u200dරී ලංකා",  # Sinhala
        "র\u200d্যাম",  # Bengali
        "അവന്\u200d",  # Malayalam, a chillu at the end of a word
        "rows ❤\ufe0f\u200d🔥",
        "👩🏽\u200d💻/👨\u200d👩\u200d👧",
        "🏳\ufe0f\u200d🌈 1\ufe0f\u20e3",
    ],
)
def test_a_joiner_is_taken_where_its_script_or_emoji_needs_it_and_is_printed(name: str) -> None:
    assert not problem_of_name(name)
    assert shown(name) == name


@pytest.mark.parametrize(
    ("name", "position"),
    [
        ("adm\u200din", 3),
        ("adm\u200cin", 3),
        ("a\ufe0f", 1),
        ("1\ufe0f", 1),
        ("\u200dक", 0),
        ("\ufe0f", 0),
        ("م\u200d\u200dخ", 1),
        ("مa\u200cخ", 2),
        ("م\u200cक", 1),  # two scripts
        ("क\u200d🔥", 1),
        ("🔥\u200da", 1),
        ("🔥\u200d", 1),
        ("क्\u202eष", 2),
        ("م\u200fخ", 1),
        ("❤\ufe0f\ufe0f", 2),
        ("❤\ufe0e", 1),
        ("م\u2066خ", 1),
        ("🏴\U000e0067", 1),
    ],
)
def test_a_joiner_elsewhere_and_every_bidi_control_is_refused_and_escaped(name: str, position: int) -> None:
    assert problem_of_name(name).startswith(f"character {position} is U+{ord(name[position]):04X}, which")
    assert name[position] not in shown(name[: position + 1])[position:]


@pytest.mark.parametrize("text", ["a\u200db", "a\u202eb", "a\ufe0fb"])
def test_a_stored_dataset_whose_names_are_refused_today_is_not_set_aside(tmp_path: Path, text: str) -> None:
    settings = ServiceSettings(data_dir=tmp_path, min_free_disk_mb=1)
    blobs = Blobs(settings)
    blobs.prepare()
    registry = DatasetRegistry(settings, blobs)
    registry.prepare()
    rows = dataset_bodies.RowsSource(type="rows", rows=[{"text": "a"}])
    asyncio.run(registry.register(dataset_bodies.RegisterDataset(dataset_id="kept", source=rows)))
    [path] = registry._directory.glob("*.json")
    document = json.loads(path.read_text())
    document["dataset"]["source"] = {"type": "uri", "uri": f"/rows/{text}.jsonl"}
    path.write_text(json.dumps(document))
    registry = DatasetRegistry(settings, blobs)
    registry.prepare()
    assert registry.get("kept").source.uri == f"/rows/{text}.jsonl"
    assert [*registry._directory.iterdir()] == [path]
    with pytest.raises(ValueError, match="is not printed"):
        dataset_bodies.UriSource(type="uri", uri=text)
