"""The service's settings: every knob with its meaning, what is refused, and what the engine gets of them."""

from __future__ import annotations

import ipaddress
import os
import platform
import re
import ssl
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import AfterValidator, AliasChoices, ConfigDict, Field, SecretStr, field_validator

from llama_stack_provider_trl.config import EngineSettings
from llama_stack_provider_trl.documented import Documented
from llama_stack_provider_trl.errors import InvalidRequest, TrlError
from llama_stack_provider_trl.jobs.store.tokens import UNLIMITED, Role, TokenLimits
from llama_stack_provider_trl.launch.devices import usable_devices
from llama_stack_provider_trl.launch.gpus import NO_GANG, slices_of
from llama_stack_provider_trl.requests.options import Priority
from llama_stack_provider_trl.requests.settings import Settings
from llama_stack_provider_trl.specs.exact import AbsolutePath, ExactValues
from llama_stack_provider_trl.specs.exports import HUB_TOKEN_FILE, destination_of
from llama_stack_provider_trl.specs.job import Prefetch, ShardingSpec, ShardingStrategy
from llama_stack_provider_trl.system.logs import LogLevel
from llama_stack_provider_trl.system.token_file import read_token

from ..wire import NAME
from .openai_settings import OpenAISettings
from .pool_settings import PoolSettings

DEFAULT_DATA_DIR = "~/.llama/trl-service"
OPERATOR, NODES, LOCAL = "operator", "nodes", "local"
"""Names of `api_token`, of `node_token`, and of every caller where no token is needed."""
RESERVED = re.compile(rf"{OPERATOR}|{NODES}|{LOCAL}|configured-\d+")
"""Names that no other token may have."""


class SettingsError(TrlError, ValueError):
    """Raised when the service cannot start with its settings; names the setting and the remedy."""


_BUCKET_PATH = re.compile(r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[^/?#\s]+)*/?")


def _bucket_path(value: str) -> str:
    if not _BUCKET_PATH.fullmatch(value) or {".", ".."} & {*value.split("/")}:
        raise ValueError(f"{value!r} is no path of a bucket: expected s3://BUCKET or s3://BUCKET/PATH")
    return value


def _export_place(value: str) -> str:
    try:
        destination_of(value if "/" in value.partition("://")[2] else f"{value}/name")
    except ValueError as error:
        raise ValueError(
            f"{value!r} is no place for exports: expected hf://OWNER[/NAME] or s3://BUCKET[/PATH]"
        ) from error
    return value


ExportPlace = Annotated[str, AfterValidator(_export_place)]
"""`hf://OWNER`, `hf://OWNER/NAME`, `s3://BUCKET` or `s3://BUCKET/PATH`."""
BucketPath = Annotated[str, AfterValidator(_bucket_path)]
"""`s3://BUCKET` or `s3://BUCKET/PATH`."""


class _Block(Documented, ExactValues):
    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, hide_input_in_errors=True, defer_build=True
    )


class FsdpConfig(_Block):
    """How several ranks hold one model."""

    sharding_strategy: ShardingStrategy = "FULL_SHARD"
    """FULL_SHARD, SHARD_GRAD_OP, HYBRID_SHARD or NO_SHARD (DDP)."""
    mixed_precision_policy: Literal["bf16", "fp16"] | None = None
    """dtype of jobs that do not set it; null: bf16 on GPUs, fp32 elsewhere. fp16 (with loss scaling): GPUs only."""
    cpu_offload: bool = False
    """Shards rest in CPU memory while they are not used."""
    limit_all_gathers: bool = True
    """What FSDP2 always does; false is refused."""
    forward_prefetch: bool = False
    """Fetch the next block's weights during the forward pass."""
    backward_prefetch: Prefetch | None = None
    """BACKWARD_PRE, BACKWARD_POST or null."""

    @field_validator("limit_all_gathers")
    @classmethod
    def _always_limited(cls, value: bool) -> bool:
        if not value:
            raise ValueError("FSDP2 always limits its all-gathers and has no switch for it: leave it out or use true")
        return value


class TorchRunConfig(_Block):
    """Which processes train one job."""

    nnodes: int = Field(1, ge=1)
    """Machines of a job that does not set it; more than 1 needs a `host` that other machines can reach."""
    nproc_per_node: int | Literal["auto"] = "auto"
    """Ranks on each node of a job that does not set it; auto: one per GPU of this machine, `cpu_ranks` without GPUs."""
    cpu_ranks: int = Field(1, ge=1, le=1024)
    """Ranks that `nproc_per_node: auto` means on a machine without GPUs, where they share the CPU."""
    node_rank: int = Field(0, ge=0)
    """0: this is the head. A worker has 1 or more, and runs an agent (`trl-remote agent`) instead of the service."""
    master_addr: str = "127.0.0.1"
    """Literal address at which the other nodes reach this one; loopback: found out by this machine's agent."""
    master_port: int = Field(29500, ge=1024, le=65435)
    """The first of 100 ports; each job of several ranks takes a free one."""

    @field_validator("node_rank")
    @classmethod
    def _is_head(cls, value: int) -> int:
        if value:
            raise ValueError("the service is the head, node 0: a worker runs `trl-remote agent --service URL`")
        return value

    @field_validator("nproc_per_node")
    @classmethod
    def _some_ranks(cls, value: int | str) -> int | str:
        if isinstance(value, int) and not 1 <= value <= 1024:
            raise ValueError("use a number from 1 to 1024, or auto")
        return value

    @field_validator("master_addr", mode="before")
    @classmethod
    def _default_address(cls, value: Any) -> Any:
        return "127.0.0.1" if value in (None, "", "localhost") else value

    @field_validator("master_addr")
    @classmethod
    def _is_address(cls, value: str) -> str:
        try:
            return str(ipaddress.ip_address(value.strip("[]")))
        except ValueError as error:
            raise ValueError(
                f"{value!r} is no IP address: give the literal one at which other nodes reach this machine, since a "
                "name may lead to another of its interfaces, or leave it out"
            ) from error


class Token(_Block):
    """Who may call."""

    token: SecretStr = Field(min_length=1)
    """Sent as `Authorization: Bearer TOKEN`."""
    role: Role = "submit"
    """submit: everything but deleting jobs and what nodes do. read: what submit sees, and no change. node: what agents
    do. metrics: `GET /metrics`. admin: everything."""
    name: str | None = Field(None, pattern=NAME)
    """Its name in the audit log and as `created_by` of jobs; null: `configured-` and its number in the list."""
    max_queued_jobs: int | None = Field(None, gt=0)
    """Jobs of this token that may wait at once, paused ones included; more is a 429. null: any number."""
    requests_per_second: float | None = Field(None, gt=0)
    """Requests of this token on average, in bursts of up to twice as many; more is a 429. null: any number."""
    priorities: tuple[Priority, ...] | None = Field(None, min_length=1)
    """Priorities that jobs of this token may have; null: all."""

    @property
    def limits(self) -> TokenLimits:
        return TokenLimits(self.max_queued_jobs, self.requests_per_second, self.priorities)


class ConfiguredToken(NamedTuple):
    token: str
    name: str
    role: Role
    setting: str
    """Where it is configured."""
    limits: TokenLimits = UNLIMITED


class _ListenSettings(_Block):
    """Where the service listens, and whom it lets in."""

    host: str = "127.0.0.1"
    """Address to listen on. Beyond loopback a token is required, and TLS or `insecure`."""
    port: int = Field(8322, ge=0, le=65535)
    """Port to listen on; 0: any free one."""
    api_token: SecretStr | None = Field(None, validation_alias=AliasChoices("api_token", "token"))
    """The operator's token (role admin); the adapter in the same file sends it."""
    tokens: tuple[Token, ...] = ()
    """Further tokens with their roles."""
    allowed_hosts: tuple[str, ...] = ()
    """Names, besides loopback's, under which clients may call the service (Host header)."""
    tls_cert: AbsolutePath | None = None
    """Certificate chain (PEM) to serve https with."""
    tls_key: AbsolutePath | None = None
    """Its private key."""
    insecure: bool = False
    """Serve beyond loopback without TLS: tokens then cross the network in the clear."""

    node_name: str = Field(default_factory=platform.node, pattern=NAME)
    """This machine's name among the nodes; null: its host name."""
    node_token: SecretStr | None = None
    """A token with the role node, for agents; null: they use one of `tokens`, or the operator's."""
    announce: bool = False
    """Announce the service on the local network by mDNS, for `trl-remote nodes discover`. Needs the extra discovery."""


class ServiceSettings(EngineSettings, _ListenSettings):  # fields of the last base come first
    """Every setting of the service; unknown keys are refused at start."""

    PAGE: ClassVar[str] = "docs/reference/service.md"

    data_dir: AbsolutePath = Path(DEFAULT_DATA_DIR)
    fsdp_config: FsdpConfig = FsdpConfig()
    """How several ranks hold one model."""
    torch_run_config: TorchRunConfig = TorchRunConfig()
    """Which processes train one job."""
    batch_size: int | None = Field(None, gt=0, le=10**6)
    """Rows per rank and micro step where a job does not set it; null: a job must set it."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass where a job does not set it."""
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """full: the same as gradient_checkpointing. selective: every second block recomputes, half the saving and cost."""
    pools: tuple[PoolSettings, ...] = ()
    """Machines that are requested when jobs wait, and given back: see docs/clusters.md."""
    dataset_roots: tuple[AbsolutePath, ...] = ()
    """Directories whose files may be named as a dataset's uri; none: no files."""
    dataset_buckets: tuple[BucketPath, ...] = ()
    """Paths in buckets, such as s3://BUCKET/PATH, whose files may be named as a dataset's uri; none: no bucket. Needs
    pyarrow (extra s3)."""
    max_body_mb: int = Field(32, gt=0)
    """MiB of a request body, rows of a registered dataset included; more is a 413."""
    max_upload_mb: int = Field(16384, gt=0)
    """MiB of an uploaded dataset, or of the rows of one that is read from a uri; more is a 413."""
    max_rows: int = Field(10_000_000, gt=0)
    """Rows of a dataset; more is a 413."""
    max_datasets: int = Field(10_000, gt=0, le=10**6)
    """Datasets that one token may have registered at a time; more is a 409."""
    max_stored_mb: int = Field(262_144, gt=0)
    """MiB of rows that one token may have uploaded and registered at a time; more is a 507."""
    max_connections: int | None = Field(None, ge=8, le=60_000)
    """Connections at a time; null: three quarters of the open files that the process may have beyond a reserve of
    256, 4096 at most."""
    max_streams: int = Field(128, ge=1, le=60_000)
    """Event streams and downloads at a time of one token, and of one address but loopback; more is a 429."""
    check_cpu_seconds: float = Field(20.0, gt=0, le=10**6)
    """CPU seconds per minute that checks of patterns, schemas, rows, tokenizers and packages' methods may take for the
    requests of one token; more is a 429. Without tokens there is no limit."""
    convert_timeout: float = Field(600.0, gt=0)
    """Seconds that reading a dataset from a uri, or checking a large one, may take."""
    reader_memory_mb: int = Field(2048, ge=512)
    """MiB of memory that a process may take which reads a dataset from a uri, or checks a large one (Linux)."""
    preflight_memory_mb: int = Field(4096, ge=1024)
    """MiB that a preflight may take for rows, chat template and tracing, besides its libraries (Linux)."""
    preflight_timeout: float = Field(300.0, gt=0)
    """Seconds that a preflight may take, waiting for its turn included."""
    device_memory_gb: float | None = Field(None, gt=0)
    """GiB per device that a preflight counts on; null: what this machine's have."""

    serving_processes: int = Field(2, ge=1, le=64)
    """Models that answer chats at a time on each device that no job has; adapters of one base model are one."""
    serving_idle_seconds: float = Field(300.0, gt=0, le=10**6)
    """Seconds without a chat after which the process that answers for a model ends, and its memory is free."""
    max_chats: int = Field(128, ge=1, le=60_000)
    """Chats at a time of one token; more is a 429, and more answers (`n`) in one request a 400."""
    chat_timeout: float = Field(600.0, gt=0)
    """Seconds that an answer may take, waiting for its turn and for the model included; then it is a 503."""

    audit_mb: float = Field(16.0, gt=0, le=1024)
    """MiB of one file of the audit log; then the next file begins."""
    audit_files: int = Field(20, ge=2, le=10_000)
    """Files of the audit log that are kept; the oldest is removed when one more begins."""

    openai: OpenAISettings = OpenAISettings()
    """Models of OpenAI's fine-tuning API: docs/how-to/openai.md."""
    vllm_python: AbsolutePath | None = None
    """Interpreter that has vLLM, for jobs that answer prompts with engine vllm, and GRPO with use_vllm; null: none may.
    Checked at start."""

    export_destinations: tuple[ExportPlace, ...] = ()
    """Where export jobs may upload: hf://OWNER or hf://OWNER/NAME, with the account of TRL_EXPORT_HUB_TOKEN (else the
    file of TRL_EXPORT_HUB_TOKEN_FILE, else HF_TOKEN) on the hub of HF_ENDPOINT; s3://BUCKET or s3://BUCKET/PATH, with
    that of AWS_...; none: nowhere."""

    log_level: LogLevel = "info"
    """debug, info, warning or error: the lowest level in the service's log (stderr, and `logs` in `data_dir`)."""

    @field_validator("model_roots", mode="before")
    @classmethod
    def _of_a_variable(cls, value: Any) -> Any:
        """TRL_SERVICE_MODEL_ROOTS has colons between them, as PATH has."""
        return tuple(part for part in value.split(os.pathsep) if part) if isinstance(value, str) else value or ()

    @field_validator("vllm_python", mode="before")
    @classmethod
    def _none_when_empty(cls, value: Any) -> Any:
        return None if value == "" else value

    @field_validator("allowed_hosts", mode="before")
    @classmethod
    def _of_a_list(cls, value: Any) -> Any:
        """TRL_SERVICE_ALLOWED_HOSTS has commas between them."""
        return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value

    @field_validator("host", "port", mode="before")
    @classmethod
    def _default_address(cls, value: Any, info: Any) -> Any:
        return cls.model_fields[info.field_name].default if value in (None, "") else value

    @field_validator("node_name", mode="before")
    @classmethod
    def _host_name(cls, value: Any) -> Any:
        return platform.node() if value in (None, "") else value

    @field_validator("api_token", "node_token", mode="before")
    @classmethod
    def _no_empty_token(cls, value: Any) -> Any:
        return str(value) if value not in (None, "") else None

    @field_validator("tokens")
    @classmethod
    def _distinct_names(cls, value: tuple[Token, ...]) -> tuple[Token, ...]:
        names = [entry.name for entry in value if entry.name is not None]
        for name in names:
            if RESERVED.fullmatch(name):
                raise ValueError(f"the name {name!r} is reserved: give the token another name, or none")
            if names.count(name) > 1:
                raise ValueError(f"two tokens have the name {name!r}: give each a name of its own")
        return value

    @field_validator("pools")
    @classmethod
    def _distinct_pools(cls, value: tuple[PoolSettings, ...]) -> tuple[PoolSettings, ...]:
        names = [pool.name for pool in value]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two pools have the name {name!r}: give each a name of its own")
        return value

    @property
    def credentials(self) -> dict[str, Role]:
        """Token -> role."""
        return {entry.token: entry.role for entry in self.configured_tokens}

    @property
    def configured_tokens(self) -> tuple[ConfiguredToken, ...]:
        """Every token of the configuration, once."""
        found = [
            ConfiguredToken(
                entry.token.get_secret_value(),
                entry.name or f"configured-{number}",
                entry.role,
                f"tokens.{number - 1}",
                entry.limits,
            )
            for number, entry in enumerate(self.tokens, 1)
        ]
        if self.node_token:
            token = self.node_token.get_secret_value()
            found.append(ConfiguredToken(token, NODES, "node", "node_token, TRL_SERVICE_NODE_TOKEN"))
        if self.api_token:
            token = self.api_token.get_secret_value()
            found.append(ConfiguredToken(token, OPERATOR, "admin", "api_token, TRL_SERVICE_TOKEN"))
        return tuple({entry.token: entry for entry in found}.values())

    @property
    def on_loopback(self) -> bool:
        return is_loopback(self.host)

    def devices(self) -> tuple[str, ...]:
        """Raises SettingsError: the configured device is not there."""
        try:
            return tuple(usable_devices(self.device))
        except InvalidRequest as error:
            raise SettingsError(str(error)) from error

    def default_ranks(self, devices: tuple[str, ...]) -> tuple[int, str]:
        """Ranks on each node of a job that sets none, and the origin of the number."""
        config, gpus, slices = self.torch_run_config, _gpus(devices), slices_of(devices, os.environ)
        if config.nproc_per_node != "auto":
            return config.nproc_per_node, "nproc_per_node"
        if not gpus:
            return config.cpu_ranks, "auto without GPUs: cpu_ranks"
        if len(slices) == len(gpus):
            return 1, "auto on MIG slices"
        return len(gpus) - len(slices), "auto: one per GPU that is no MIG slice" if slices else "auto: one per GPU"

    def for_jobs(self, devices: tuple[str, ...]) -> Settings:
        """What the engine resolves requests with."""
        gpus, slices = _gpus(devices), slices_of(devices, os.environ)
        whole = len(gpus) - len(slices)
        ranks, _ = self.default_ranks(devices)
        if gpus and ranks > len(gpus):
            raise SettingsError(
                f"torch_run_config.nproc_per_node={ranks}: {len(gpus)} GPUs may be used here, and each "
                "rank needs one; lower it, or use auto"
            )
        if slices and ranks > max(1, whole):
            beside = f", and {whole} whole GPUs may be used here" if whole else ""
            raise SettingsError(
                f"torch_run_config.nproc_per_node={ranks}: {NO_GANG}{beside}; use {max(1, whole)}, or auto"
            )
        fsdp = self.fsdp_config
        if fsdp.mixed_precision_policy == "fp16" and len(gpus) < len(devices):
            raise SettingsError(
                f"fsdp_config.mixed_precision_policy='fp16': its loss scaling needs NVIDIA GPUs, and jobs train on "
                f"{', '.join(devices)} here; use bf16, or null"
            )
        return self.resolving(
            devices,
            model_roots=None if self.on_loopback and not self.model_roots else self.model_roots,
            vllm_python=self.vllm_python,
            export_destinations=self.export_destinations,
            train_python=self.train_python,
            ranks=ranks,
            nodes=self.torch_run_config.nnodes,
            max_nodes=1 if self.on_loopback else 1024,
            max_ranks=max(ranks, whole or (1 if slices else os.cpu_count() or 1)),
            sharding=ShardingSpec(
                strategy=fsdp.sharding_strategy,
                cpu_offload=fsdp.cpu_offload,
                forward_prefetch=fsdp.forward_prefetch,
                backward_prefetch=fsdp.backward_prefetch,
            ),
            gradient_checkpointing=self.gradient_checkpointing or self.activation_checkpointing != "none",
            checkpoint_every=2
            if self.activation_checkpointing == "selective" and not self.gradient_checkpointing
            else 1,
        )

    def tls_context(self) -> ssl.SSLContext | None:
        """How connections are encrypted; None: they are not. Raises SettingsError: the certificate or its key cannot be
        used."""
        if self.tls_cert is None or self.tls_key is None:
            return None
        try:
            return server_context(self.tls_cert, self.tls_key)
        except ValueError as error:
            raise SettingsError(str(error)) from error

    @staticmethod
    def hub_token_file() -> Path | None:
        """The file with the token by which exports are uploaded to a hub, which trainings may not see; None: none."""
        file = os.environ.get(HUB_TOKEN_FILE)
        return Path(file).expanduser().absolute() if file else None

    def check_accounts(self) -> None:
        """Raises SettingsError: the file with the token of a hub cannot be used, or others can read it."""
        if (file := self.hub_token_file()) is None:
            return
        try:
            read_token(str(file))
        except ValueError as error:
            raise SettingsError(f"{HUB_TOKEN_FILE}: {error}") from error

    def check_exposure(self) -> None:
        """Refuse to be reachable from other machines by accident. Raises SettingsError: beyond loopback without a token
        or without TLS; half of a TLS pair; a file that is not there, or that cannot be used."""
        if (self.tls_cert is None) != (self.tls_key is None):
            raise SettingsError("tls_cert and tls_key belong together: set both, or neither")
        for name in ("tls_cert", "tls_key"):
            path = getattr(self, name)
            if path is not None and not path.is_file():
                raise SettingsError(f"{name}={str(path)!r}: there is no such file")
        self.tls_context()
        if self.on_loopback and self.torch_run_config.nnodes > 1:
            raise SettingsError(
                f"torch_run_config.nnodes={self.torch_run_config.nnodes}: no other machine can reach host="
                f"{self.host!r}; set TRL_SERVICE_HOST to an address of this machine and TRL_SERVICE_TOKEN"
            )
        if self.on_loopback and self.pools:
            raise SettingsError(
                f"pools.0.name={self.pools[0].name!r}: its nodes cannot reach host={self.host!r}; set TRL_SERVICE_HOST "
                "to an address of this machine, and TRL_SERVICE_TOKEN and TRL_SERVICE_NODE_TOKEN"
            )
        if self.on_loopback and self.announce:
            raise SettingsError(
                f"announce=true: no other machine can reach host={self.host!r}; set TRL_SERVICE_HOST to an address of "
                "this machine and TRL_SERVICE_TOKEN"
            )
        if self.on_loopback:
            return
        if not self.credentials:
            raise SettingsError(
                f"host={self.host!r} can be reached from other machines: set TRL_SERVICE_TOKEN, or listen on 127.0.0.1"
            )
        if self.tls_cert is None and not self.insecure:
            raise SettingsError(
                f"host={self.host!r} can be reached from other machines, and tokens would cross the network in the "
                "clear: set tls_cert and tls_key, or accept it with --insecure"
            )


def _gpus(devices: tuple[str, ...]) -> list[str]:
    return [device for device in devices if device.startswith("cuda")]


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


_CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"
"""Of TLS 1.2: those that keep recorded traffic secret when the key is lost later. TLS 1.3 has no others."""


def server_context(certificate: Path, key: Path) -> ssl.SSLContext:
    """TLS 1.2 and 1.3, without renegotiation, for clients that bring no certificate. Raises ValueError: the files
    cannot be used."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
    context.set_ciphers(_CIPHERS)
    context.set_alpn_protocols(["http/1.1"])
    try:
        # Without a password OpenSSL would ask the terminal for one, and wait.
        context.load_cert_chain(certificate, key, password="")
    except OSError as error:
        reason = getattr(error, "reason", None) or error.strerror or str(error)
        raise ValueError(
            f"tls_cert {certificate} and tls_key {key} cannot be used ({str(reason).replace('_', ' ').lower()}): "
            "expected a certificate in PEM, and its own key without a passphrase"
        ) from error
    return context
