"""A running weights_svc."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.weights_svc.running_service import RunningService


@pytest.fixture
def service(tmp_path: Path) -> Iterator[RunningService]:
    service = RunningService(tmp_path)
    try:
        yield service
    finally:
        service.stop()
