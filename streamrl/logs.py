"""Logging set up once a process, to standard error: step and time at INFO, traffic at DEBUG."""

import logging
import sys
import time

_QUIET = ("httpx", "urllib3", "alembic", "mlflow.store", "mlflow.tracking", "filelock", "datasets", "fsspec", "numexpr")


class _UtcFormatter(logging.Formatter):
    converter = staticmethod(time.gmtime)


def set_up_logs(process_name: str, level: str = "INFO") -> None:
    """Sends every log line of this process to standard error, each naming time (UTC), process, level and module.

    Args:
        process_name: service, and for generators the instance: "trainer_svc", "generator-0".
        level: a name of the logging module: DEBUG, INFO, WARNING, ERROR.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        _UtcFormatter(
            f"%(asctime)s.%(msecs)03dZ {process_name} %(levelname)s %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%S"
        )
    )
    logging.basicConfig(level=level, handlers=[handler], force=True)
    for name in _QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)
