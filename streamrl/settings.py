"""Settings that several services read.

A service's own section is in its own settings.py; what others need to know of it (the shape of the fleet, how tokens
are sampled) is a *view* here that the section extends. The command resolves all sections from TOML, environment and
`--set` into one JSON file; a service reads its part of that file with `load`.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from streamrl.run_folder import LATEST

_MAX_INT = 2**31 - 1
"""Counts travel as 32-bit integers."""
_MAX_SECONDS = 7 * 24 * 3600.0
"""Longer waits are a mistake, and some clocks have no room for them: librdkafka's end at 24 days of milliseconds."""

PositiveInt = Annotated[int, Field(gt=0, le=_MAX_INT)]
NonNegativeInt = Annotated[int, Field(ge=0, le=_MAX_INT)]
PositiveFloat = Annotated[float, Field(gt=0)]
Seconds = Annotated[float, Field(gt=0, le=_MAX_SECONDS)]


def _host_and_port(value: str) -> str:
    host, _, port = value.rpartition(":")
    if not host or not _is_port(port):
        raise ValueError(f"expected host:port, got {value!r}")
    return value


def _is_port(text: str) -> bool:
    return re.fullmatch(r"[0-9]{1,5}", text) is not None and int(text) <= 65535


Address = Annotated[str, AfterValidator(_host_and_port)]
"""host:port."""


def _brokers(value: str) -> str:
    for broker in value.split(",") if value else ():
        host, _, port = broker.strip().rpartition(":")
        host = host.rpartition("://")[2]
        if not host or re.search(r"[\s/]", host) or not _is_port(port) or int(port) == 0:
            raise ValueError(
                f"expected host:port of one or more brokers, separated by commas, ports from 1 to 65535, got {value!r}"
            )
    return value


BrokerAddresses = Annotated[str, AfterValidator(_brokers)]
"""host:port of brokers, separated by commas; empty: none."""


class _NumbersAreNoTruthValues(BaseModel):
    """true and false are taken where a truth value is expected, and not as 1 and 0 where a number is."""

    @field_validator("*", mode="before")
    @classmethod
    def _truth_values_where_expected(cls, value: Any, info: ValidationInfo) -> Any:
        assert info.field_name is not None
        if _holds_truth_value(value) and not _takes_truth_value(cls.model_fields[info.field_name].annotation):
            raise ValueError(f"expected no truth value, got {value!r}")
        return value


def _holds_truth_value(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_holds_truth_value, value.values()))
    return any(map(_holds_truth_value, value)) if isinstance(value, list | tuple) else isinstance(value, bool)


def _takes_truth_value(annotation: Any) -> bool:
    return annotation in (bool, Any) or any(map(_takes_truth_value, get_args(annotation)))


class Section(_NumbersAreNoTruthValues):
    """A section of the settings: frozen, unknown keys refused, the text under each field is its help."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=(), allow_inf_nan=False
    )


class View(_NumbersAreNoTruthValues):
    """The part of another service's section that this service reads."""

    model_config = ConfigDict(
        frozen=True, extra="ignore", use_attribute_docstrings=True, protected_namespaces=(), allow_inf_nan=False
    )


class RunSection(Section):
    id: str = ""
    """Name of the run, in topic names and folders; empty: made from the settings file's name and the time."""
    dir: Path = Path("runs")
    """Folder that holds the runs, each in a folder named by its id."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of data order, sampling and a model made on the spot."""
    attempt: PositiveInt = 1
    """Life of the run, raised by each resume. Set by the command."""
    site: str = ""
    """Site that this process stands at, a name under `sites`; empty: there is one only. Set by `serve --site`."""
    max_restarts: NonNegativeInt = 5
    """How often within an hour `streamrl run` starts one and the same service again that died, before the run fails."""
    no_progress_s: Annotated[float, Field(ge=0, le=_MAX_SECONDS)] = 900.0
    """The run fails when nothing has moved for so long: no service works, and each waits for another. 0: it waits for
    ever."""
    watched: bool = False
    """Whether `streamrl run`, which sees every process, watches the progress of the run; else the trainer does. Set by
    the command."""
    log_level: Literal["DEBUG", "INFO", "WARNING"] = "INFO"
    """How much the services write to their logs."""

    @field_validator("id")
    @classmethod
    def _legal_topic_part(cls, value: str) -> str:
        if value and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}", value):
            raise ValueError("expected letters, digits, '-' and '_' (100 at most): it becomes part of topic names")
        if value == LATEST:
            raise ValueError(f"{LATEST!r} is the name of the link to the newest run: choose another")
        return value

    @property
    def folder(self) -> Path:
        """Everything that belongs to this run."""
        return self.dir / self.id


class PipelineSection(Section):
    mode: Literal["sync", "async", "colocated"] = "async"
    """sync: training begins as samples arrive, all of them from the newest weights. async: generation and training
    overlap, samples at most `max_staleness` versions old. colocated: generate everything, then train, in turn, each on
    the whole machine."""
    max_staleness: NonNegativeInt = Field(default=1, validate_default=False)
    """k: how many versions a token may be older than its batch. async: 1 or more; 0 in the other modes."""

    @model_validator(mode="before")
    @classmethod
    def _default_staleness(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("max_staleness") is None:
            return {**values, "max_staleness": 1 if values.get("mode", "async") == "async" else 0}
        return values

    @model_validator(mode="after")
    def _staleness_fits_mode(self) -> "PipelineSection":
        if self.mode == "async" and self.max_staleness < 1:
            raise ValueError(
                f"pipeline.max_staleness is {self.max_staleness} in mode async: expected 1 or more (0 is mode sync)"
            )
        if self.mode != "async" and self.max_staleness != 0:
            raise ValueError(
                f"pipeline.max_staleness is {self.max_staleness} in mode {self.mode}: expected 0, or mode async"
            )
        return self


class ModelSection(Section):
    path: str = "tiny"
    """A folder in Hugging Face's layout, a hub name, `package:NAME` for a model that an installed Python package
    brings, or `tiny`: a small model made and warm-started on the spot."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the weights as generators run them and as they are published; optimizers keep float32 masters."""


class RpcSection(Section):
    trainer_address: Address = "127.0.0.1:0"
    """Where the trainer listens, for status and control. Port 0 takes a free one."""
    scheduler_address: Address = "127.0.0.1:0"
    """Where the scheduler listens, and where the others find it."""
    weights_address: Address = "127.0.0.1:0"
    """Where weights_svc listens, and where the others find it."""
    generator_address: Address = "127.0.0.1:0"
    """Where a generator listens, for status and control."""
    trust: Path | None = None
    """Folder with the certificates and tokens that the services know each other by, as `streamrl certs` makes it: every
    call then goes over TLS with certificates on both sides, carries the token of its caller's role, and only a trainer
    may publish weights. Left out: plaintext, for loopback and networks of the run's own."""
    deadline_s: Seconds = 20.0
    """Deadline of a call that moves no bulk data."""
    patience_s: Seconds = 120.0
    """How long a service goes on trying to reach a peer that does not answer before it gives up."""

    @field_validator("trust")
    @classmethod
    def _found_from_everywhere(cls, value: Path | None) -> Path | None:
        """`streamrl status` and its like may be called in another folder than the run was."""
        return None if value is None else value.absolute()


_MAX_RETENTION_HOURS = 100 * 365 * 24.0
_MAX_MESSAGE_BYTES = 1_000_000_000
"""librdkafka's limit."""


class KafkaSection(Section):
    bootstrap_servers: BrokerAddresses = ""
    """host:port of one or more brokers, separated by commas. Empty: `streamrl run` starts the embedded broker."""
    embedded: Literal["tansu", "apache"] = "tansu"
    """Which broker `streamrl run` starts when `bootstrap_servers` is empty. tansu keeps its topics in memory. apache,
    one node of Apache Kafka, keeps them in the run's folder: they outlive a crash. It needs `home` and Java 17."""
    home: str = ""
    """Folder of an Apache Kafka download, for `embedded = "apache"`. Empty: the environment variable KAFKA_HOME."""
    client: dict[str, str | int | float | bool] = Field(default_factory=dict)
    """librdkafka's own settings, such as "security.protocol" or "sasl.password", passed through."""
    rollout_partitions: Annotated[int, Field(gt=0, le=1024)] = 4
    """Partitions of topic `rollouts`."""
    replication_factor: Annotated[int, Field(gt=0, le=100)] = 1
    """Copies of each topic in the cluster."""
    retention_hours: Annotated[float, Field(gt=0, le=_MAX_RETENTION_HOURS)] = 24.0
    """How long a topic keeps a record."""
    retention_bytes: Annotated[int, Field(gt=0, lt=2**63)] = 8 * 1024**3
    """How much a topic keeps in each partition."""
    max_message_bytes: Annotated[int, Field(gt=0, le=_MAX_MESSAGE_BYTES)] = 8 * 1024**2
    """Largest record. The longest legal rollout must fit (about 9 bytes a token)."""
    compression: Literal["none", "gzip", "snappy", "lz4", "zstd"] = "lz4"
    """How producers compress."""
    patience_s: Annotated[float, Field(ge=0.1, le=_MAX_SECONDS)] = 120.0
    """How long a service goes on trying to reach a broker that does not answer, and to deliver a record, before it
    gives up."""


class WeightsSection(Section):
    swap: Literal["boundary", "in_flight"] = "boundary"
    """boundary: an instance loads new weights between its batches. in_flight: in the middle of sequences."""
    kv_on_swap: Literal["recompute", "keep"] = "recompute"
    """in_flight only. recompute: running sequences get their cache anew under the new weights. keep: they go on with
    the old cache."""
    one_version_per_batch: bool = False
    """Whether all answers of a batch come from one version, on every instance. In two phases: each instance fetches a
    version beside its work as soon as that is announced, and loads it before the first answer of the batch that asks
    for exactly this one. Otherwise instances go to newer versions one by one. Not with `swap = "in_flight"`."""
    keep_versions: Annotated[int, Field(ge=2, le=_MAX_INT)] = 3
    """How many of the newest versions weights_svc keeps on disk; older ones go when no receiver uses them."""
    chunk_bytes: Annotated[int, Field(ge=4096, le=32 * 1024**2)] = 2 * 1024**2
    """Bulk data travels in chunks of this size."""
    keep_base: bool = False
    """Whether an instance keeps the version that it loaded last in host memory, and fetches only what differs from it.
    Worth its memory where the line to weights_svc is slower than a few hundred megabytes a second."""
    anchor_every: Annotated[int, Field(ge=0)] = 100
    """Between sites a version travels as the difference to the one that the other site holds; every so many versions
    one goes in full. 0: none has to."""
    max_bytes_per_s: Annotated[float, Field(ge=0)] = 0.0
    """Most bytes a second that a relay takes from its upstream. 0: as fast as they come."""
    num_connections: Annotated[int, Field(ge=1, le=64)] = 4
    """Over how many connections at once a relay takes a version of more than 8 MiB: on a long line one alone does not
    fill it. Each holds up to 16 MiB that is not its turn yet."""
    fabric: str = ""
    """Untested on hardware. The name of a network between GPUs over which weights_svc sends each version to all
    instances of its site in one broadcast by NCCL, beside their work; whoever is not reached so fetches. weights_svc
    and each instance need a GPU for it, no two of them the same, with 1 GiB to spare; `streamrl run` gives weights_svc
    the trainer's first. NCCL neither encrypts nor asks who is there. Empty: all instances fetch."""
    upstream: Address | None = None
    """Makes weights_svc a relay: where it takes its versions from. Left out: versions are published to it. Set by
    `serve weights --site`."""
    found_at: Address | None = None
    """Where the receivers of its site find a relay. Left out: where it listens. Set by `serve weights --site`."""


class SamplingView(View):
    """How tokens are sampled, and how large the fleet is: the part of `generator` that others read."""

    num_instances: PositiveInt = 1
    """Generators that `streamrl run` starts."""
    max_tokens: PositiveInt = 256
    """Longest answer, its ending token included. A longer one is cut and counts as truncated."""
    max_model_len: NonNegativeInt = 0
    """Most tokens of a prompt and its answer together. 0: what the model's config allows."""
    temperature: PositiveFloat = 1.0
    """Of training samples. Evaluation is greedy."""
    top_p: float = 1.0
    """Only 1: training needs log-probs of the distribution that was sampled."""
    top_k: int = 0
    """Only 0 (off): training needs log-probs of the distribution that was sampled."""

    @model_validator(mode="after")
    def _whole_distribution(self) -> "SamplingView":
        for name, off in (("top_p", 1.0), ("top_k", 0)):
            value = getattr(self, name)
            if value != off:
                raise ValueError(
                    f"generator.{name} is {value}: training needs log-probs of the distribution that was sampled, and "
                    f"{name} cuts it. Leave generator.{name} at {off} and use generator.temperature instead"
                )
        return self


class FleetView(View):
    """The part of `scheduler` that others read."""

    max_instances: Annotated[int, Field(gt=0, le=4096)] = 64
    """Most instances at once: the number of partitions of topic `assignments`."""
    lease_s: Annotated[float, Field(ge=0.5, le=_MAX_SECONDS)] = 10.0
    """An instance that gets no answer from the scheduler for this long stops, and its samples go to others."""


class ServiceSettings(BaseModel):
    """What every service reads of the resolved settings file."""

    model_config = ConfigDict(frozen=True, extra="ignore", protected_namespaces=())

    run: RunSection = RunSection()
    pipeline: PipelineSection = PipelineSection()
    model: ModelSection = ModelSection()
    rpc: RpcSection = RpcSection()
    kafka: KafkaSection = KafkaSection()
    weights: WeightsSection = WeightsSection()
    generator: SamplingView = SamplingView()
    scheduler: FleetView = FleetView()


SettingsT = TypeVar("SettingsT", bound=ServiceSettings)


def load(settings_class: type[SettingsT], path: Path) -> SettingsT:
    """A service's part of a resolved settings file (JSON, written by the command).

    Raises:
        ValueError: the file is missing or does not fit.
    """
    if not path.is_file():
        raise ValueError(f"settings file {path} is missing: expected the settings.json of a run folder")
    return settings_class.model_validate_json(path.read_text())
