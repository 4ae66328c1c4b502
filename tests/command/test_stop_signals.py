"""Signals over the life of a command, in processes of their own."""

import signal
import subprocess
import sys

import pytest

_PROGRAM = """
import os, signal, sys
from streamrl.command.stop_signals import StopSignals, ignore_stop_signals
signal.signal(signal.SIGHUP, signal.SIG_IGN if sys.argv[1] == "nohup" else signal.SIG_DFL)
StopSignals()
try:
    os.kill(os.getpid(), int(sys.argv[2]))
except KeyboardInterrupt:
    print("interrupted")
ignore_stop_signals()
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    os.kill(os.getpid(), number)
print("ended")
"""


def _printed(how: str, number: signal.Signals) -> list[str]:
    command = [sys.executable, "-c", _PROGRAM, how, str(int(number))]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_interrupts_and_those_after_it_change_nothing(number: signal.Signals) -> None:
    assert _printed("plain", number) == ["interrupted", "ended"]


def test_a_run_under_nohup_outlives_its_terminal() -> None:
    assert _printed("nohup", signal.SIGHUP) == ["ended"]
