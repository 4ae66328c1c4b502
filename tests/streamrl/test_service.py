"""What every service does around its own work."""

import asyncio
import errno
import json
import os
from pathlib import Path

from streamrl.service import EXIT_FAILED, Service, main
from streamrl.settings import ServiceSettings


def test_a_service_that_meets_a_full_disk_says_so_in_one_sentence(tmp_path: Path) -> None:
    async def serve(_settings: ServiceSettings, _instance: str, _stop: asyncio.Event) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    settings = tmp_path / "settings.json"
    settings.write_text(json.dumps({"run": {"id": "r", "dir": str(tmp_path)}}))
    assert main(Service("weights_svc", ServiceSettings, serve), [str(settings), "--instance", "w"]) == EXIT_FAILED
    folder = tmp_path / "r"
    assert json.loads((folder / "services" / "w.error.json").read_text()) == {
        "kind": "StorageError",
        "message": f"the disk is full: run folder {folder}. Free space, then streamrl resume {folder}",
    }
