"""`trl-remote export` of a trained adapter, from the command to the files.

It takes a minute: `TRL_TESTS=full ./scripts/test.sh tests/contract/test_export_jobs.py` runs it.
"""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import pytest

from llama_stack_provider_trl.system.files import is_whole
from llama_stack_provider_trl_remote.cli.main import main
from tests.census import assert_clean
from tests.contract.crashing import CrashingService
from tests.contract.payloads import LORA, QUESTIONS, sft
from tests.contract.service import TrainingService, running
from tests.contract.stack import SFT, poll
from tests.hub_server import serve
from tests.required import IN_FULL
from tests.tiny import tiny_model

pytestmark = [pytest.mark.contract, pytest.mark.timeout(400)]


@IN_FULL
def test_the_result_of_a_job_is_exported_by_one_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server = CrashingService(tmp_path)
    with closing(server.store), running(server):
        monkeypatch.setenv("TRL_SERVICE_URL", server.url)
        server.register("rows", QUESTIONS)
        then = {"evaluate": {"dataset_id": "rows"}}
        server.submit(SFT, {**sft("tune", "rows"), "algorithm_config": LORA}, options=then)
        words = [
            "export",
            "tune",
            "--to",
            "gguf",
            "--type",
            "f16",
            "--job",
            "exported",
            "--promote-if",
            "tune-evaluation:loss<=1000",
            "--pull",
            str(tmp_path / "gguf"),
        ]
        assert main(words) == 0, capsys.readouterr()
        found = server.status("exported")["resources_allocated"]["result"]
        assert json.loads((tmp_path / "gguf" / "export.json").read_text()) == found
        assert (tmp_path / "gguf" / "model.gguf").stat().st_size > 100_000
        assert found["adapter_difference"] > 0
        measured = server.status("tune-evaluation")["resources_allocated"]["result"]["loss"]
        (gate,) = found["gates"]
        assert gate == {"evaluation": "tune-evaluation", "metric": "loss", "at_most": 1000.0, "found": measured}
        assert main(["export", "tune", "--to", "gguf", "--promote-if", "tune-evaluation:loss<=0.001"]) == 1
        asked = f"promote_if.0 does not hold: loss of 'tune-evaluation' is {measured}, and at most 0.001 was asked."
        assert f"failed (not_promoted): {asked} Nothing was written." in capsys.readouterr().err
        lineage = json.loads((tmp_path / "gguf" / "lineage.json").read_text())
        assert lineage["adapter_made_by"] == "tune/final"
        assert lineage["training"]["datasets"][0]["id"] == "rows"
        assert lineage["export"]["gates"] == found["gates"]
        unmapped = {"job_uuid": "x", "model": "job:tune", "to": "safetensors", "gguf_type": "f16"}
        answer = server.post("/post-training/export", unmapped)
        assert answer.status_code == 400
        assert "gguf_type='f16' is not supported: safetensors keeps the type" in answer.text


@IN_FULL
def test_a_service_and_an_exporter_that_are_killed_leave_no_half_export_and_no_device_taken(tmp_path: Path) -> None:
    server = CrashingService(tmp_path)
    with closing(server.store), running(server):
        for point in ("written-final", "exporting-final"):
            server.arm(point, "hold")
        body = {"job_uuid": "out", "model": str(tiny_model()), "to": "gguf"}
        assert server.post("/post-training/export", body, options={"retries": 1}).status_code == 200
        final = Path(server.status("out")["resources_allocated"]["effective_config"]["checkpoint_dir"]) / "final"

        server.wait_taken("written-final", server.patience)
        server.kill()
        server.kill_tasks()
        assert not final.exists()
        server.restart()

        server.wait_taken("exporting-final", server.patience)
        server.kill()
        assert not final.exists()
        server.go("exporting-final")
        poll(final.exists, "the exporter, which nobody has killed, puts its export in place", server.patience)
        server.restart()

        server.wait_until_it_answers()
        assert server.wait("out", "completed", timeout=60)["resources_allocated"]["attempt"] == 2
        assert is_whole(final)
        assert [path.name for path in final.parent.iterdir()] == ["final"]
        assert_clean(server.data_dir)
        question = [{"role": "user", "content": "What is two?"}]
        chat = {"model": str(tiny_model()), "messages": question, "max_tokens": 4}
        assert server.post("/chat/completions", chat, prefix="/openai/v1").status_code == 200


class Online(TrainingService):
    """A service whose trainings ask a hub."""

    def launch(self) -> None:
        self.process = self.spawn(self.port, self.data_dir, self.log, HF_HUB_OFFLINE="0")


def test_a_service_sends_an_export_with_its_own_account_where_its_operator_allows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with serve() as hub:
        hub.writer = token = "hf_the-writer-of-exports"
        for name, value in {"HF_ENDPOINT": hub.url, "TRL_EXPORT_HUB_TOKEN": token}.items():
            monkeypatch.setenv(name, value)
        server = Online(tmp_path, export_destinations=["hf://team"])
        with running(server):
            monkeypatch.setenv("TRL_SERVICE_URL", server.url)
            words = ["export", str(tiny_model()), "--to", "safetensors", "--job", "sent", "--upload-to"]
            assert main([*words, "hf://other/sft-1"]) != 0
            assert "below one of the configured export_destinations (hf://team)" in capsys.readouterr().err
            assert main([*words, "hf://team/sft-1"]) == 0, capsys.readouterr()
            found = server.status("sent")["resources_allocated"]["result"]["upload"]
        assert found["commit"] == hub.repositories["team/sft-1"].branches["main"]
        assert not [path for path in tmp_path.rglob("*") if path.is_file() and token.encode() in path.read_bytes()]
