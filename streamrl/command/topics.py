"""`streamrl topics`: makes, shows and deletes the topics of a run, for clusters on which services may not make them.

Services make what is missing by themselves; after a run its topics stay until they are deleted.
"""

from argparse import Namespace
from dataclasses import asdict
from pathlib import Path

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient
from rich.table import Table

from streamrl.command.display import output_console
from streamrl.command.report import EXIT_COMPLETED, write_error, write_json
from streamrl.command.resolve import resolve, resolve_again
from streamrl.command.settings import Settings
from streamrl.command.sites import at_site, keeps_prompts
from streamrl.errors import BrokerUnavailableError
from streamrl.kafka.connection import Connection
from streamrl.kafka.topic_states import TopicState, topic_states
from streamrl.kafka.topics import Topics, create_topics
from streamrl.run_folder import RunFolder

_TIMEOUT_S = 30.0


def topics(arguments: Namespace) -> int:
    """Runs the command.

    Raises:
        ValueError: the settings name no run or no cluster.
        StreamRLError: the cluster does not answer, or refuses.
    """
    settings = _settings(arguments)
    connection = Connection(settings.kafka, "streamrl-topics")
    connection.check(_TIMEOUT_S)
    of_run = Topics(settings.run.id)
    names = of_run.all if keeps_prompts(settings) else of_run.of_generation_site
    place = {
        "run_id": settings.run.id,
        "site": settings.run.site,
        "bootstrap_servers": settings.kafka.bootstrap_servers,
    }
    match arguments.action:
        case "create":
            changed = create_topics(connection, of_run, settings.scheduler.max_instances, names=names)
            _tell(place, "created", changed, as_json=arguments.json)
        case "delete":
            _tell(place, "deleted", delete_topics(connection, names), as_json=arguments.json)
        case _:
            states = topic_states(connection, names)
            if arguments.json:
                write_json({**place, "topics": [asdict(state) for state in states]})
            else:
                _show(states)
    return EXIT_COMPLETED


def delete_topics(connection: Connection, names: tuple[str, ...]) -> list[str]:
    """Deletes those of the topics that are there, and what they hold.

    Returns:
        Their names.

    Raises:
        BrokerUnavailableError: the cluster did not answer, or refused.
    """
    admin = AdminClient(connection.client_config())
    deleted = []
    for name, future in admin.delete_topics(list(names), operation_timeout=_TIMEOUT_S).items():
        try:
            future.result()
            deleted.append(name)
        except KafkaException as error:
            if error.args[0].code() != KafkaError.UNKNOWN_TOPIC_OR_PART:
                raise BrokerUnavailableError(
                    f"topic {name} could not be deleted: {error.args[0].str()}{connection.explain()}"
                ) from error
    return deleted


def _settings(arguments: Namespace) -> Settings:
    """Those of CONFIG, or of the run whose folder it is."""
    config: Path = arguments.config
    if config.is_dir():
        settings = _settings_of_run(RunFolder(config.resolve()), arguments.set)
    else:
        settings = resolve(config, arguments.set, must_have_id=True)
    return settings if arguments.site is None else at_site(settings, arguments.site)


def _settings_of_run(folder: RunFolder, assignments: list[str]) -> Settings:
    return resolve_again(folder.read_settings(), str(folder.settings), assignments)


def _tell(place: dict[str, str], done: str, names: list[str], *, as_json: bool) -> None:
    write_error(f"{done}: {', '.join(names) or 'none'}")
    if as_json:
        write_json({**place, done: names})


def _show(states: list[TopicState]) -> None:
    table = Table(box=None)
    table.add_column("topic")
    for column in ("partitions", "replicas", "records"):
        table.add_column(column, justify="right")
    for state in states:
        table.add_row(state.topic, str(state.partitions), str(state.replicas), str(state.records))
    output_console().print(table)
