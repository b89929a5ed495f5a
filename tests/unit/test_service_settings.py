"""The service's settings and who it lets in: one file, two readers; refusals before anything starts."""

from __future__ import annotations

import asyncio
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from llama_stack_provider_trl.requests.trackers import (
    MlflowSettings,
    TensorBoardSettings,
    TrackerSettings,
    TrackioSettings,
    WandbSettings,
)
from llama_stack_provider_trl.specs.job import ShardingSpec
from llama_stack_provider_trl_remote.nodes.pools.base import PoolOrder, PoolRefusal
from llama_stack_provider_trl_remote.nodes.pools.ssh_pool import SshPool
from llama_stack_provider_trl_remote.service.app import make_app
from llama_stack_provider_trl_remote.service.configured_pools import managed_pool
from llama_stack_provider_trl_remote.service.loading import fill_in, load_settings, provider_block
from llama_stack_provider_trl_remote.service.openai_settings import OpenAIModel, OpenAISettings, OpenAIWebhook
from llama_stack_provider_trl_remote.service.pool_settings import (
    KubernetesPoolSettings,
    NodeShape,
    RayPoolSettings,
    SlurmPoolSettings,
    SshPoolSettings,
)
from llama_stack_provider_trl_remote.service.server import serve
from llama_stack_provider_trl_remote.service.settings import (
    FsdpConfig,
    ServiceSettings,
    SettingsError,
    Token,
    TorchRunConfig,
)
from tests.fakes import fake_context

REPOSITORY = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "trl", "transformers", "datasets", "pyarrow", "pandas", "llama_stack", "ray")


INNER: dict[str, type[BaseModel] | tuple[type[BaseModel], ...]] = {
    **{"fsdp_config": FsdpConfig, "torch_run_config": TorchRunConfig, "tokens": Token, "trackers": TrackerSettings},
    **{"trackers.tensorboard": TensorBoardSettings, "trackers.mlflow": MlflowSettings},
    **{"trackers.wandb": WandbSettings, "trackers.trackio": TrackioSettings},
    **{"openai": OpenAISettings, "openai.models": OpenAIModel, "openai.webhooks": OpenAIWebhook},
    **{"pools": (SlurmPoolSettings, RayPoolSettings, KubernetesPoolSettings, SshPoolSettings), "pools.node": NodeShape},
}


def write(path: Path, **config: Any) -> Path:
    provider = {"provider_id": "trl", "provider_type": "remote::trl_remote", "config": config}
    path.write_text(yaml.safe_dump({"providers": {"post_training": [provider]}}))
    return path


def load(tmp_path: Path, environ: dict[str, str] | None = None, **config: Any) -> ServiceSettings:
    return load_settings(write(tmp_path / "run.yaml", **config), environ or {})[0]


def refused(tmp_path: Path, **config: Any) -> str:
    with pytest.raises(SettingsError) as caught:
        load(tmp_path, **config)
    return str(caught.value)


def test_the_documentation_lists_every_setting_and_no_other() -> None:
    text = (REPOSITORY / "docs" / "reference" / "service.md").read_text()
    table = text.split("<!-- settings -->")[1].split("<!-- /settings")[0]
    assert re.findall(r"^\| `([\w.]+)` \|", table, flags=re.MULTILINE) == list(_names(ServiceSettings))


def test_the_shipped_run_file_configures_the_service(tmp_path: Path) -> None:
    settings, path = load_settings(REPOSITORY / "run_fsdp.yaml", {"TRL_SERVICE_DATA_DIR": str(tmp_path)})
    assert path == REPOSITORY / "run_fsdp.yaml"
    assert settings.data_dir == tmp_path
    assert (settings.host, settings.port) == ("127.0.0.1", 8322)
    assert settings.for_jobs(("cpu",)).ranks == 2


@pytest.mark.parametrize("gpus", [0, 1, 2, 8])
def test_the_shipped_run_file_uses_every_gpu_of_the_machine(tmp_path: Path, gpus: int) -> None:
    settings, _ = load_settings(REPOSITORY / "run_fsdp.yaml", {"TRL_SERVICE_DATA_DIR": str(tmp_path)})
    devices = tuple(f"cuda:{number}" for number in range(gpus)) or ("cpu",)
    expected = (gpus, "auto: one per GPU") if gpus else (2, "auto without GPUs: cpu_ranks")
    assert settings.default_ranks(devices) == expected
    assert settings.for_jobs(devices).ranks == expected[0]


def test_a_number_of_ranks_in_the_environment_goes_before_auto(tmp_path: Path) -> None:
    environ = {"TRL_SERVICE_DATA_DIR": str(tmp_path), "TRL_NPROC_PER_NODE": "1"}
    settings, _ = load_settings(REPOSITORY / "run_fsdp.yaml", environ)
    for devices in (("cuda:0", "cuda:1"), ("cpu",)):
        assert settings.default_ranks(devices) == (1, "nproc_per_node")


def test_what_the_adapter_reads_is_passed_over_and_what_has_no_reader_is_refused(tmp_path: Path) -> None:
    load(
        tmp_path, url="http://127.0.0.1:8322", connect_timeout=5, read_timeout=60, total_timeout=120, submit_timeout=900
    )
    known = "docs/reference/service.md lists them all"
    assert f"retrys is not a setting: did you mean `retries`? {known}" in refused(tmp_path, retrys=3)
    found = refused(tmp_path, fsdp_config={"sharding_strateg": "FULL_SHARD"})
    assert f"fsdp_config.sharding_strateg is not a setting: did you mean `sharding_strategy`? {known}" in found
    assert f"colour is not a setting: {known}" in refused(tmp_path, colour=3)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"fsdp_config": {"limit_all_gathers": False}}, "FSDP2 always limits"),
        ({"fsdp_config": {"sharding_strategy": "SOME_SHARD"}}, "sharding_strategy='SOME_SHARD'"),
        ({"torch_run_config": {"node_rank": 1}}, "the service is the head, node 0: a worker runs `trl-remote agent"),
        ({"torch_run_config": {"master_addr": "head.example"}}, "'head.example' is no IP address"),
        ({"node_name": "a/b"}, "node_name='a/b'"),
        ({"torch_run_config": {"nproc_per_node": 0}}, "from 1 to 1024, or auto"),
        ({"trust_remote_code": ["org/model"]}, "ORG/NAME@REVISION"),
        ({"max_seq_length": "long"}, "max_seq_length='long'"),
        ({"tokens": [{"token": "hush", "role": "king"}]}, "tokens.0.role"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(tmp_path: Path, config: dict[str, Any], expected: str) -> None:
    reported = refused(tmp_path, **config)
    assert expected in reported
    assert "hush" not in reported


@pytest.mark.parametrize(
    ("given", "kept"),
    [("localhost", "127.0.0.1"), ("", "127.0.0.1"), ("10.0.0.7", "10.0.0.7"), ("[2001:DB8::7]", "2001:db8::7")],
)
def test_an_address_for_other_nodes_may_be_written_as_in_a_url(tmp_path: Path, given: str, kept: str) -> None:
    assert load(tmp_path, torch_run_config={"master_addr": given}).torch_run_config.master_addr == kept


def test_fp16_is_for_gpus_only(tmp_path: Path) -> None:
    settings = load(tmp_path, fsdp_config={"mixed_precision_policy": "fp16"})
    assert settings.for_jobs(("cuda:0",)).devices == ("cuda:0",)
    with pytest.raises(SettingsError, match=r"mixed_precision_policy='fp16'.* cpu here; use bf16, or null"):
        settings.for_jobs(("cpu",))


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, (False, 1)),
        ({"activation_checkpointing": "selective"}, (True, 2)),
        ({"activation_checkpointing": "full"}, (True, 1)),
        ({"activation_checkpointing": "selective", "gradient_checkpointing": True}, (True, 1)),
    ],
)
def test_activation_checkpointing_reaches_the_engine(
    tmp_path: Path, config: dict[str, Any], expected: tuple[bool, int]
) -> None:
    jobs = load(tmp_path, **config).for_jobs(("cpu",))
    assert (jobs.gradient_checkpointing, jobs.checkpoint_every) == expected


def test_the_promised_configuration_reaches_the_engine(tmp_path: Path) -> None:
    settings = load(
        tmp_path,
        fsdp_config={
            "sharding_strategy": "SHARD_GRAD_OP",
            "mixed_precision_policy": "bf16",
            "cpu_offload": True,
            "limit_all_gathers": True,
            "forward_prefetch": True,
            "backward_prefetch": "BACKWARD_PRE",
        },
        torch_run_config={"nnodes": 1, "nproc_per_node": 2, "node_rank": 0, "master_addr": None, "master_port": 29600},
        max_seq_length=2048,
        batch_size=4,
        gradient_checkpointing=False,
        activation_checkpointing="full",
    )
    jobs = settings.for_jobs(("cpu",))
    assert (jobs.ranks, jobs.max_seq_length, jobs.gradient_checkpointing) == (2, 2048, True)
    assert jobs.sharding == ShardingSpec(
        strategy="SHARD_GRAD_OP", cpu_offload=True, forward_prefetch=True, backward_prefetch="BACKWARD_PRE"
    )


def test_auto_means_one_rank_per_gpu_and_more_ranks_than_gpus_are_refused(tmp_path: Path) -> None:
    gpus = ("cuda:0", "cuda:1")
    assert load(tmp_path).for_jobs(gpus).ranks == 2
    assert load(tmp_path).for_jobs(("cpu",)).ranks == 1
    with pytest.raises(SettingsError, match="2 GPUs may be used"):
        load(tmp_path, torch_run_config={"nproc_per_node": 3}).for_jobs(gpus)


def test_variables_go_before_the_file_and_options_before_both(tmp_path: Path) -> None:
    path = write(tmp_path / "run.yaml", port=1, host="file", api_token="file")
    environ = {"TRL_SERVICE_PORT": "2", "TRL_SERVICE_TOKEN": "environment", "TRL_SERVICE_CONFIG": str(path)}
    settings, _ = load_settings(None, environ, port=3)
    assert (settings.port, settings.host, settings.credentials) == (3, "file", {"environment": "admin"})
    assert load_settings(None, environ)[0].port == 2
    assert "environment" not in repr(settings)


def test_a_file_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    other = tmp_path / "other.yaml"
    for text, expected in [("a: [", "is no YAML"), ("[]", "has 0 providers"), ("providers: 7", "has 0 providers")]:
        other.write_text(text)
        with pytest.raises(SettingsError, match=expected):
            load_settings(other, {})
    with pytest.raises(SettingsError, match=r"missing.yaml cannot be read \(No such file or directory\): name another"):
        load_settings(tmp_path / "missing.yaml", {})


def test_what_has_set_a_wrong_value_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "run.yaml", port=700000)
    for environ, over, expected in (
        ({"TRL_SERVICE_PORT": "1"}, {"port": 700000}, "--port: port=700000: "),
        ({"TRL_SERVICE_PORT": "many"}, {"host": "::1"}, "TRL_SERVICE_PORT: port='many': "),
        ({}, {}, f"{path}, remote::trl_remote: port=700000: "),
    ):
        with pytest.raises(SettingsError, match=f"^{re.escape(expected)}"):
            load_settings(path, environ, **over)


def test_a_data_directory_that_cannot_be_created_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("no directory")
    assert serve(ServiceSettings(port=0, data_dir=tmp_path / "file" / "data")) == 1
    error = capsys.readouterr().err
    assert f"the data directory {tmp_path}/file/data cannot be created (Not a directory): choose another" in error


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("${env.SET}", "value"),
        ("${env.SET:=other}", "value"),
        ("${env.UNSET:=other}", "other"),
        ("${env.UNSET:=}", None),
        ("${env.UNSET:=8322}", 8322),
        ("${env.UNSET:=True}", True),
        ("${env.SET:+there}", "there"),
        ("${env.UNSET:+there}", None),
        ("~/${env.SET}/x", "~/value/x"),
        ("plain", "plain"),
        (["${env.SET}", 7], ["value", 7]),
    ],
)
def test_variables_in_the_file_are_read_as_llama_stack_reads_them(text: Any, expected: Any) -> None:
    assert fill_in(text, {"SET": "value"}) == expected


def test_a_variable_without_a_value_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="set NEEDED"):
        provider_block(write(tmp_path / "run.yaml", host="${env.NEEDED}"), {})


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"host": "0.0.0.0"}, "set TRL_SERVICE_TOKEN"),
        ({"host": "192.0.2.7", "api_token": "t"}, "in the clear"),
        ({"tls_cert": "/no/cert.pem"}, "belong together"),
        ({"tls_cert": "/no/cert.pem", "tls_key": "/no/key.pem"}, "no such file"),
    ],
)
def test_exposure_is_never_an_accident(tmp_path: Path, config: dict[str, Any], expected: str) -> None:
    with pytest.raises(SettingsError, match=expected):
        load(tmp_path, **config).check_exposure()


def test_loopback_needs_nothing_and_insecure_is_logged(tmp_path: Path) -> None:
    for host in ("127.0.0.1", "localhost", "::1", "127.1.2.3"):
        load(tmp_path, host=host).check_exposure()
    load(tmp_path, host="0.0.0.0", api_token="t", insecure=True).check_exposure()


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "127.0.0.1:8322", "authorization": "Bearer a"}, 200),
        ({"host": "localhost", "authorization": "bearer  b"}, 200),
        ({"host": "localhost"}, 401),
        ({"host": "localhost", "authorization": "Bearer "}, 401),
        ({"host": "localhost", "authorization": "Bearer ab"}, 401),
        ({"host": "localhost", "authorization": "Basic a"}, 401),
        ({"host": "rebound.example", "authorization": "Bearer a"}, 403),
        ({"authorization": "Bearer a"}, 403),
        ({"host": "localhost", "authorization": "Bearer a", "origin": "null"}, 403),
        ({"host": "localhost", "authorization": "Bearer a", "content-length": "2000000"}, 413),
    ],
)
def test_the_gate_admits_authorized_callers(headers: dict[str, str], status: int) -> None:
    settings = ServiceSettings.model_validate(
        {"api_token": "a", "tokens": [{"token": "b"}], "max_body_mb": 1, "host": "127.0.0.1"}
    )
    assert asyncio.run(_answer(settings, headers)) == status


def test_beyond_loopback_an_address_is_a_fine_host_but_a_strange_name_is_not() -> None:
    settings = ServiceSettings.model_validate({"host": "0.0.0.0", "api_token": "a"})
    token = {"authorization": "Bearer a"}
    assert asyncio.run(_answer(settings, {"host": "10.1.2.3:8322", **token})) == 200
    assert asyncio.run(_answer(settings, {"host": "rebound.example", **token})) == 403


def test_the_service_imports_neither_torch_nor_llama_stack() -> None:
    script = (
        "import sys, llama_stack_provider_trl_remote.service.server, llama_stack_provider_trl_remote.service.__main__; "
        f"print(*sorted(set(sys.modules) & set({HEAVY!r})))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


async def _answer(settings: ServiceSettings, headers: dict[str, str]) -> int:
    """The status that a GET with these headers gets."""
    statuses = []

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        statuses.append(message.get("status"))

    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "method": "GET", "path": "/docs", "query_string": b"", "headers": raw}
    await make_app(fake_context(settings))(scope, receive, send)
    return int(statuses[0])


def _names(model: type[BaseModel], prefix: str = "") -> list[str]:
    names = []
    for name in model.model_fields:
        inner = INNER.get(prefix + name)
        models = inner if isinstance(inner, tuple) else (inner,) if inner else ()
        found = [one for model in models for one in _names(model, f"{prefix}{name}.")]
        names += list(dict.fromkeys(found)) if models else [prefix + name]
    return names


def test_several_machines_need_an_address_that_they_can_reach(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"nnodes=2: .*TRL_SERVICE_HOST.*TRL_SERVICE_TOKEN"):
        load(tmp_path, torch_run_config={"nnodes": 2}).check_exposure()
    open_one = {"host": "0.0.0.0", "api_token": "t", "insecure": True}
    settings = load(tmp_path, torch_run_config={"nnodes": 2}, **open_one)
    settings.check_exposure()
    jobs = settings.for_jobs(("cpu",))
    assert (jobs.nodes, jobs.max_nodes > 2) == (2, True)
    assert load(tmp_path).for_jobs(("cpu",)).max_nodes == 1


def test_names_of_the_service_may_come_from_the_environment(tmp_path: Path) -> None:
    environ = {"TRL_SERVICE_ALLOWED_HOSTS": "service, service.training ,"}
    assert load(tmp_path, environ, allowed_hosts=["a.example"]).allowed_hosts == ("service", "service.training")
    assert load(tmp_path, allowed_hosts=["a.example"]).allowed_hosts == ("a.example",)


SLURM = {
    **{"name": "slurm", "kind": "slurm", "max_nodes": 2, "service_url": "http://10.0.0.1:8322/"},
    **{"token_file": "/etc/trl/token", "node": {"gpus": 8, "gpu_memory_gb": 80}},
}
OPEN = {"host": "0.0.0.0", "api_token": "t", "insecure": True}


def test_pools_need_an_address_that_their_nodes_can_reach(tmp_path: Path) -> None:
    settings = load(tmp_path, pools=[SLURM], **OPEN)
    settings.check_exposure()
    (pool,) = settings.pools
    assert (pool.service_url, pool.node.words(), pool.node.node().devices[7]) == (
        *("http://10.0.0.1:8322", "8 GPUs"),
        "cuda:7",
    )
    with pytest.raises(SettingsError, match=r"'slurm'.* cannot reach host='127.0.0.1'; set TRL_SERVICE_HOST"):
        load(tmp_path, pools=[SLURM]).check_exposure()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_nodes": -1}, r"pools\.0\.slurm\.max_nodes=-1"),
        ({"kind": "ray"}, r"pools\.0.*'ray'"),
        ({"service_url": "http://localhost:8322"}, "other machines cannot reach it"),
        ({"service_url": "10.0.0.1"}, "expected an address such as https://"),
        ({"options": ["--nodes=9"]}, "except --job-name, --nodes"),
        ({"options": ["-p gpu"]}, "that begin with --"),
        ({"name": "Slurm!"}, r"pools\.0\.slurm\.name"),
        ({"dataset_roots": ["/data"]}, r"pools\.0\.slurm\.dataset_roots is not a setting"),
        ({"nodes": 3}, r"pools\.0\.slurm\.nodes is not a setting: did you mean `node`"),
    ],
)
def test_a_pool_that_cannot_be_right_is_refused_by_name(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(SettingsError, match=message):
        load(tmp_path, pools=[{**SLURM, **changes}], **OPEN)
    with pytest.raises(SettingsError, match="two pools have the name 'slurm'"):
        load(tmp_path, pools=[SLURM, SLURM], **OPEN)


RAY = {
    **{"name": "ray", "kind": "ray", "max_nodes": 0, "service_url": "http://10.0.0.1:8322/"},
    **{"address": "http://10.0.0.5:8265", "token_file": "/etc/trl/token"},
}


@pytest.mark.parametrize("root", ["data", "/", "/a/../b", "s3://bucket"])
def test_directories_of_datasets_on_ray_are_whole_paths(tmp_path: Path, root: str) -> None:
    (pool,) = load(tmp_path, pools=[{**RAY, "dataset_roots": ["/shared/data/"]}], **OPEN).pools
    assert isinstance(pool, RayPoolSettings)
    assert pool.dataset_roots == ("/shared/data",)
    with pytest.raises(SettingsError, match="expected the whole path of a directory"):
        load(tmp_path, pools=[{**RAY, "dataset_roots": [root]}], **OPEN)


KUBERNETES = {
    **{"name": "k8s", "kind": "kubernetes", "max_nodes": 2, "service_url": "http://10.0.0.1:8322", "image": "trl:1"},
    "tolerations": [{"key": "gpu", "operator": "Exists"}],
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"image": None}, r"pools\.0\.kubernetes\.image"),
        ({"image": "two words"}, r"pools\.0\.kubernetes\.image"),
        ({"token_file": "/etc/trl/token"}, r"pools\.0\.kubernetes\.token_file is not a setting"),
        ({"namespace": "Training"}, r"pools\.0\.kubernetes\.namespace"),
        ({"grace_seconds": 0}, r"pools\.0\.kubernetes\.grace_seconds=0"),
        ({"user": 0}, r"pools\.0\.kubernetes\.user=0"),
        ({"gpu_resource": "gpu"}, r"pools\.0\.kubernetes\.gpu_resource"),
        ({"partial_seconds": 1}, r"pools\.0\.kubernetes\.partial_seconds=1"),
        ({"pod_labels": {"app.kubernetes.io/name": "x"}}, "app.kubernetes.io/name is set for each pod"),
        ({"pod_labels": {"trl-remote/request": "x"}}, "trl-remote/request is set for each pod"),
        ({"pod_labels": {"team": "two words"}}, r"pools\.0\.kubernetes\.pod_labels\.team"),
        ({"pod_labels": {"-team": "x"}}, r"pools\.0\.kubernetes\.pod_labels"),
        ({"pod_annotations": {"two words": "x"}}, r"pools\.0\.kubernetes\.pod_annotations"),
        ({"pod_annotations": {"a": "x" * 300_000}}, "have 300001 bytes, and Kubernetes allows 262144"),
        ({"priority_class": "High Priority"}, r"pools\.0\.kubernetes\.priority_class"),
        ({"affinity": {"nodeAffinities": {}}}, "nodeAffinities: expected nodeAffinity, podAffinity, podAntiAffinity"),
        ({"pod_resources": {"cpu": 4}}, "use node.cpus, node.memory_gb and node.gpus"),
        ({"pod_resources": {"nvidia.com/gpu": 4}}, "use node.cpus, node.memory_gb and node.gpus"),
        ({"pod_resources": {"rdma": 1}}, "'rdma' is no resource of Kubernetes"),
        ({"pod_resources": {"rdma/hca": 0}}, "rdma/hca: '0': expected an amount above 0"),
        ({"pod_resources": {"rdma/hca": "many"}}, "rdma/hca: 'many': expected an amount above 0"),
        ({"pod_resources": {"rdma/hca": True}}, r"pools\.0\.kubernetes\.pod_resources"),
        ({"capabilities": ["SYS_ADMIN"]}, r"pools\.0\.kubernetes\.capabilities"),
        ({"claims": {"models": "models"}}, "expected a whole path"),
        ({"claims": {"models": "/work/models"}}, "directories of their own in /work"),
        ({"claims": {"a": "/models", "b": "/models"}}, "two claims have the same directory"),
        ({"environment": {"HF_TOKEN": "hush"}}, "HF_TOKEN looks like a secret"),
        ({"environment": {"TRL_NODE_NAME": "n"}}, "TRL_NODE_NAME is set for each pod"),
        ({"tolerations": [{"operator": "Exists", "value": "x"}]}, "operator Exists takes no value"),
        ({"tolerations": [{"value": "x"}]}, "name the key of the taint"),
        ({"tolerations": [{"key": "gpu", "effect": "Never"}]}, "effect"),
    ],
)
def test_a_pool_of_kubernetes_that_cannot_be_right_is_refused_by_name(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    (pool,) = load(tmp_path, pools=[KUBERNETES], **OPEN).pools
    assert isinstance(pool, KubernetesPoolSettings)
    assert pool.tolerations[0].model_dump(exclude_none=True) == {"key": "gpu", "operator": "Exists"}
    with pytest.raises(SettingsError, match=message) as caught:
        load(tmp_path, pools=[{**KUBERNETES, **changes}], **OPEN)
    assert "hush" not in str(caught.value)


def test_a_pool_of_an_inventory_is_checked_before_anything_starts(tmp_path: Path) -> None:
    inventory = tmp_path / "nodes.yaml"
    given = {"name": "rack", "kind": "ssh", "max_nodes": 2, "service_url": "http://10.0.0.1:8322"}
    ssh = {**given, "inventory": str(inventory), "machines": ["a"]}

    def made(**changes: Any) -> SshPool:
        settings = load(tmp_path, pools=[{**ssh, **changes}], **OPEN, node_token="agents")
        pool = managed_pool(settings.pools[0], settings).pool
        assert isinstance(pool, SshPool)
        return pool

    with pytest.raises(SettingsError, match=r"pools: 'rack': the inventory \S+/nodes.yaml cannot be read"):
        made()
    inventory.write_text("nodes: [{host: 10.0.0.11, name: a}, {host: 10.0.0.12, name: b}]")
    assert made().choose("abc", 1, []) == "a"
    assert made(machines=[]).choose("abc", 2, []) == "a,b"
    with pytest.raises(SettingsError, match=r"'rack': there is no node 'c' in the inventory: it has a, b"):
        made(machines=["c"])
    settings = load(tmp_path, pools=[ssh], **OPEN)
    with pytest.raises(SettingsError, match=r"'rack': its agents join with the node_token of the service"):
        managed_pool(settings.pools[0], settings)
    inventory.write_text("service: http://10.9.9.9:8322\nnodes: [{host: 10.0.0.11, name: a}]")
    with pytest.raises(
        PoolRefusal, match=r"has the service http://10.9.9.9:8322, the pool has service_url http://10.0.0.1"
    ):
        made().request(PoolOrder("abc", ("rack-abc-0",), "a"))


def test_agents_have_a_token_and_machines_a_name(tmp_path: Path) -> None:
    environ = {"TRL_SERVICE_TOKEN": "all", "TRL_SERVICE_NODE_TOKEN": "agents", "TRL_NODE_NAME": "head-1"}
    settings = load(tmp_path, environ, tokens=[{"token": "more", "role": "node"}])
    assert settings.credentials == {"all": "admin", "agents": "node", "more": "node"}
    assert settings.node_name == "head-1"
    assert load(tmp_path, node_name="").node_name == platform.node()
