"""All settings of a run: every service's own sections together, and the rules between them that no single service sees.

Sections are described where they are read: in streamrl/settings.py and in each service's settings.py. How a TOML file,
the environment and `--set` become one of these is in resolve.py.
"""

from pydantic import Field, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from generator_svc.settings import GeneratorSection, GeneratorSettings
from scheduler_svc.settings import SchedulerSection, SchedulerSettings
from streamrl.command.site_settings import SiteName, SiteSection
from streamrl.settings import (
    KafkaSection,
    ModelSection,
    PipelineSection,
    RpcSection,
    RunSection,
    ServiceSettings,
    WeightsSection,
)
from trainer_svc.settings import (
    DataSection,
    EvalSection,
    MlflowSection,
    RewardSection,
    TrainerSection,
    TrainerSettings,
)
from weights_svc.settings import WeightsServiceSettings

SERVICE_SETTINGS: dict[str, type[ServiceSettings]] = {
    "trainer": TrainerSettings,
    "generator": GeneratorSettings,
    "scheduler": SchedulerSettings,
    "weights": WeightsServiceSettings,
}
"""What each service reads of the settings, with the rules that it sets between its sections."""


class Settings(BaseSettings):
    """One run, whole."""

    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        env_prefix="STREAMRL_",
        env_nested_delimiter="__",
        protected_namespaces=(),
    )

    run: RunSection = RunSection()
    pipeline: PipelineSection = PipelineSection()
    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    reward: RewardSection = RewardSection()
    generator: GeneratorSection = GeneratorSection()
    trainer: TrainerSection = TrainerSection()
    scheduler: SchedulerSection = SchedulerSection()
    weights: WeightsSection = WeightsSection()
    eval: EvalSection = EvalSection()
    kafka: KafkaSection = KafkaSection()
    rpc: RpcSection = RpcSection()
    mlflow: MlflowSection = MlflowSection()
    sites: dict[SiteName, SiteSection] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _sections_fit(self) -> "Settings":
        generator, scheduler = self.generator, self.scheduler
        problems = []
        if generator.num_instances > scheduler.max_instances:
            problems.append(
                f"generator.num_instances is {generator.num_instances}, more than scheduler.max_instances "
                f"({scheduler.max_instances}) has room for: raise that, or start fewer generators"
            )
        has_cluster = self.kafka.bootstrap_servers or any(site.kafka for site in self.sites.values())
        if self.kafka.replication_factor > 1 and not has_cluster:
            problems.append(
                f"kafka.replication_factor is {self.kafka.replication_factor}, but the embedded broker is a single "
                "one: leave it at 1, or set kafka.bootstrap_servers"
            )
        if self.weights.one_version_per_batch and self.weights.swap == "in_flight":
            problems.append(
                'weights.one_version_per_batch is set and weights.swap is "in_flight", which changes the version in '
                'the middle of a batch: set weights.swap = "boundary", or leave weights.one_version_per_batch out'
            )
        if self.weights.one_version_per_batch and self.weights.keep_versions <= self.pipeline.max_staleness:
            problems.append(
                f"weights.keep_versions is {self.weights.keep_versions}: with weights.one_version_per_batch a batch "
                f"asks for a version that is up to pipeline.max_staleness ({self.pipeline.max_staleness}) behind the "
                f"newest. Set weights.keep_versions to {self.pipeline.max_staleness + 1} at least"
            )
        training_sites = [name for name, site in self.sites.items() if site.role == "training"]
        if len(training_sites) > 1:
            problems.append(
                f"sites {' and '.join(training_sites)} have the role of training: expected one such site at most"
            )
        if problems:
            raise ValueError("; ".join(problems))
        return self

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Only what is passed in: resolve.py reads the sources one by one, to say where a wrong key stands."""
        del settings_cls, env_settings, dotenv_settings, file_secret_settings
        return (init_settings,)
