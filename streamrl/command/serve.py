"""`streamrl serve`: one service in the foreground, for clusters, where something else starts, watches and restarts it.

All services of a run are given the same CONFIG: the addresses in it must be real ones, since nobody can hand on a port
that one of them has found free. With `--site` a service takes broker and peers of that site (sites.py).
"""

import os
from argparse import Namespace
from pathlib import Path

from streamrl.command.report import write_error
from streamrl.command.resolve import resolve
from streamrl.command.settings import Settings
from streamrl.command.sites import at_site
from streamrl.command.supervisor import service_command
from streamrl.run_folder import RunFolder, unusable_as_bad_input, write_private

_MUST_FIND = {
    "trainer": ("scheduler_address", "weights_address"),
    "generator": ("scheduler_address", "weights_address"),
    "scheduler": ("scheduler_address", "weights_address"),
    "weights": ("weights_address",),
}
"""What each service must be able to find: nobody calls the trainer or a generator to do the work."""


def serve(arguments: Namespace) -> int:
    """Becomes the service; returns only by raising.

    Raises:
        ValueError: the settings leave open what only `streamrl run` could decide, or the service does not stand at
            the site.
    """
    service, instance = arguments.service, arguments.instance or arguments.service
    settings = resolve(arguments.config, arguments.set, must_have_id=True)
    if arguments.site is not None:
        settings = at_site(settings, arguments.site, service)
    check_final(service, settings)
    if service == "generator" and arguments.instance is None:
        raise ValueError("give this generator a name of its own in the run: --instance generator-0")
    settings_file = _write_settings(service, instance, settings)
    place = f" at site {settings.run.site}" if settings.run.site else ""
    write_error(f"{instance} of run {settings.run.id}{place}: settings in {settings_file}")
    command = service_command(service, instance, settings_file)
    os.execv(command[0], command)


def check_final(service: str, settings: Settings) -> None:
    """Raises ValueError when services that were started apart could not find each other."""
    problems = []
    if not settings.kafka.bootstrap_servers:
        hint = f", or give --site ({', '.join(settings.sites)})" if settings.sites and not settings.run.site else ""
        problems.append(f"kafka.bootstrap_servers is empty: the embedded broker comes only with `streamrl run`{hint}")
    for name in _MUST_FIND[service]:
        address = getattr(settings.rpc, name)
        if address.endswith(":0"):
            problems.append(f"rpc.{name} is {address}: give it a port that the other services can know")
    if problems:
        raise ValueError("; ".join(problems))


def _write_settings(service: str, instance: str, settings: Settings) -> Path:
    """Where a service finds its settings: the trainer's run folder is the run's own, and has them where every run does.

    Raises:
        ValueError: the place is not one where a run can be.
    """
    folder = RunFolder(settings.run.folder)
    file = folder.settings if service == "trainer" else folder.path / "services" / f"{instance}.settings.json"
    with unusable_as_bad_input(folder.path):
        (folder.path / "services").mkdir(parents=True, exist_ok=True)
        write_private(file, settings.model_dump_json(indent=2))
    return file
