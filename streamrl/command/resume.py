"""`streamrl resume`: the next attempt of a run that was stopped, failed or was killed, from its newest checkpoint.

Settings are those of the run, but for `--set`; addresses that the command had chosen are chosen anew. What is taken
from the checkpoint and from the topics is the trainer's decision.
"""

import contextlib
from argparse import Namespace

from streamrl.command.attempts import begin_next_attempt, last_settings, wait_for_earlier_processes
from streamrl.command.display import open_display
from streamrl.command.fixed_settings import check_changes
from streamrl.command.report import write_error
from streamrl.command.resolve import resolve_again
from streamrl.command.run import carry_out, tell
from streamrl.command.runs import named_run
from streamrl.command.settings import Settings
from streamrl.command.stop_signals import StopSignals
from streamrl.run_folder import RunFolder, RunRecord
from streamrl.storage import told_as_storage_error

_PROCESSES_END_S = 15.0
"""Whatever is killed, its children end within 10 s."""


def resume(arguments: Namespace) -> int:
    """Runs the command.

    Returns:
        The exit code.

    Raises:
        ValueError: there is no such run, it is completed or still runs, or a setting cannot be changed any more.
        StreamRLError: the broker does not answer.
    """
    folder = named_run(arguments.run)
    with folder.lock(), told_as_storage_error(folder.path):
        record = folder.read_record()
        if record.state == "running":
            raise ValueError(f"run {record.run_id} runs (process {record.process.pid}): see streamrl status")
        settings = _settings(folder, record, arguments.set)
        check_not_done(record, _summary(folder), settings.trainer.num_iterations)
        signals = StopSignals()
        with contextlib.closing(open_display(settings.generator.num_instances)) as display:
            wait_for_earlier_processes(record, _PROCESSES_END_S, display.step)
            display.step(f"run {record.run_id}: attempt {folder.last_attempt() + 1}, checking")

            def begin(settings: Settings, new_record: RunRecord) -> Settings:
                settings = begin_next_attempt(folder, settings)
                folder.write_record(new_record)
                return settings

            outcome = carry_out(settings, folder, display, signals, record.config, begin)
    return tell(outcome, settings, folder, as_json=arguments.json)


def check_not_done(record: RunRecord, summary: dict[str, object] | None, num_iterations: int) -> None:
    """
    Raises:
        ValueError: the run has completed all iterations that it is to have.
    """
    done = (summary or {}).get("iterations")
    if record.status == "completed" and isinstance(done, int) and num_iterations <= done:
        raise ValueError(
            f"run {record.run_id} is completed: it has done its {done} iterations. To train on, give it more: "
            f"--set trainer.num_iterations={2 * done}"
        )


def _summary(folder: RunFolder) -> dict[str, object] | None:
    """How the last attempt ended; None where it has not said so, or cannot be understood: the checkpoint knows."""
    try:
        return folder.read_summary()
    except ValueError as error:
        write_error(f"warning: {error}. The run is taken up without it")
        return None


def _settings(folder: RunFolder, record: RunRecord, assignments: list[str]) -> Settings:
    """Those of the run with the changes, as far as they are allowed."""
    before = last_settings(folder, record.chosen)
    after = resolve_again(before.model_dump(mode="json"), str(folder.settings), assignments)
    check_changes(before, after)
    return after
