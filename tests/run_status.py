"""What `streamrl status --json` says, without a process for each look: tests look often."""

import asyncio
from pathlib import Path
from typing import Any

from streamrl.command.observer import Observer
from streamrl.command.status import status_report
from streamrl.run_folder import RunFolder
from streamrl.settings import ServiceSettings, load


def status_of(path: Path) -> dict[str, Any]:
    """The state of the run in a folder; empty while there is none."""
    folder = RunFolder(path)
    if not folder.record.exists() or not folder.settings.exists():
        return {}
    return asyncio.run(_status(folder))


async def _status(folder: RunFolder) -> dict[str, Any]:
    settings = load(ServiceSettings, folder.settings)
    async with Observer(settings.run.id, settings.rpc) as observer:
        return status_report(folder.read_record(), await observer.observe(), folder.read_summary())
