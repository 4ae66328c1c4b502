"""The command `streamrl`: its arguments.

What a subcommand needs is imported when it runs, so that `--help` is instant.
"""

import argparse
import logging
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import NoReturn

from streamrl import __version__
from streamrl.command.report import EXIT_FAILED, EXIT_INTERRUPTED, tell_failure, write_error, write_json
from streamrl.command.stop_signals import ignore_stop_signals
from streamrl.errors import StreamRLError

_EPILOG = """\
RUN is a run's id or its folder; left out, it is the newest run (runs/latest).
Settings come from CONFIG (TOML), then from the environment (STREAMRL_TRAINER__NUM_ITERATIONS=10), then from --set.
Exit codes: 0 completed, 1 failed, 2 bad input, 130 interrupted."""


class _Parser(argparse.ArgumentParser):
    """Raises on bad arguments, so that they are told like any other bad input."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message} (see {self.prog} --help)")


def main() -> int:
    """Runs the command as this process: once its outcome is known, no signal changes the exit code."""
    return run_command(sys.argv[1:], on_outcome=ignore_stop_signals)


def run_command(arguments_given: Sequence[str], *, on_outcome: Callable[[], None] = lambda: None) -> int:
    """Runs the command.

    Args:
        on_outcome: called as soon as it is known how the command ended, before that is told.

    Returns:
        The exit code: 0 completed, 1 failed, 2 bad input, 130 interrupted.
    """
    as_json = "--json" in arguments_given
    # Nothing is logged unless a subcommand says where to: standard error belongs to progress.
    logging.basicConfig(handlers=[logging.NullHandler()])
    try:
        arguments = _parser().parse_args(arguments_given)
        module, function = arguments.runs.split(":")
        handler: Callable[[argparse.Namespace], int] = getattr(import_module(module), function)
        exit_code = handler(arguments)
        on_outcome()
        return exit_code
    except (ValueError, StreamRLError) as error:
        on_outcome()
        return tell_failure(error, as_json=as_json)
    except KeyboardInterrupt:
        on_outcome()
        write_error("interrupted")
        if as_json:
            write_json({"status": "stopped", "error": {"kind": "interrupted", "message": "interrupted"}})
        return EXIT_INTERRUPTED
    except Exception as error:  # the outermost edge: with --json, even a fault of ours ends in one line
        on_outcome()
        if as_json:
            tell_failure(error, as_json=True)
        sys.excepthook(type(error), error, error.__traceback__)
        return EXIT_FAILED


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="streamrl",
        description="Reinforcement learning for LLMs, with generation and training as separate services.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"streamrl {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    run = _command(commands, "run", "streamrl.command.run:run", "start a run and wait until it is over")
    _settings_arguments(run)
    run.add_argument("--dry-run", action="store_true", help="resolve and check the settings, start nothing")

    resume = _command(
        commands, "resume", "streamrl.command.resume:resume", "take a run up again from its newest checkpoint"
    )
    _run_argument(resume)
    _set_argument(resume, "change one key of the run's settings (repeatable)")

    rollback = _command(
        commands, "rollback", "streamrl.command.rollback:rollback", "take a run back to an earlier weight version"
    )
    _run_argument(rollback)
    rollback.add_argument("--version", type=int, required=True, metavar="N", help="of a checkpoint; 0: the beginning")

    status = _command(commands, "status", "streamrl.command.status:status", "show what a run does, or how it ended")
    _run_argument(status)
    status.add_argument("--watch", action="store_true", help="go on showing it until the run is over")

    stop = _command(
        commands, "stop", "streamrl.command.stop:stop", "end a run at the end of its iteration, with a checkpoint"
    )
    _run_argument(stop)
    stop.add_argument("--now", action="store_true", help="end it at once, without a checkpoint")

    serve = _command(
        commands, "serve", "streamrl.command.serve:serve", "run one service in the foreground, for clusters"
    )
    serve.add_argument("service", choices=("trainer", "generator", "scheduler", "weights"), help="which service")
    _settings_arguments(serve)
    _site_argument(serve)
    serve.add_argument("--instance", metavar="NAME", help="name of this process in the run (generators need one each)")

    plan = commands.add_parser("plan", help="plan by hand: JSON in, JSON out", description="Plan by hand.")
    plans = plan.add_subparsers(title="plans", metavar="PLAN", required=True)
    dispatch = _command(
        plans, "dispatch", "streamrl.command.plan:dispatch", "divide answers of given lengths among instances"
    )
    dispatch.add_argument(
        "request",
        nargs="?",
        type=Path,
        metavar="FILE",
        help="a JSON object, as docs/dispatching.md has it (default: standard input)",
    )

    profile = _command(
        commands, "profile", "streamrl.command.profile:profile", "measure how fast an engine of the settings is"
    )
    _settings_arguments(profile)
    profile.add_argument("--out", type=Path, metavar="FILE", help="write it there too: a value for generator.profile")

    topics = _command(
        commands, "topics", "streamrl.command.topics:topics", "make, list or delete the topics of a run in its cluster"
    )
    topics.add_argument("action", choices=("create", "list", "delete"), help="what to do with them")
    _settings_arguments(topics)
    _site_argument(topics)

    certs = _command(
        commands, "certs", "streamrl.command.certs:certs", "make an authority, certificates and tokens for trials"
    )
    certs.add_argument("folder", type=Path, metavar="DIR", help="where to write them: a value for rpc.trust")
    certs.add_argument("--days", type=float, default=365.0, help="how long they are valid (default: %(default)g)")

    _command(commands, "doctor", "streamrl.command.doctor:doctor", "say what this machine lacks, and how to get it")
    return parser


def _command(
    commands: "argparse._SubParsersAction[_Parser]", name: str, runs: str, summary: str
) -> argparse.ArgumentParser:
    command = commands.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
    command.set_defaults(runs=runs)
    command.add_argument("--json", action="store_true", help="write the result as one line of JSON to standard output")
    return command


def _settings_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("config", type=Path, metavar="CONFIG", help="settings (TOML)")
    _set_argument(command, "set one key, over CONFIG and environment (repeatable)")


def _set_argument(command: argparse.ArgumentParser, summary: str) -> None:
    command.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help=summary)


def _site_argument(command: argparse.ArgumentParser) -> None:
    command.add_argument("--site", metavar="NAME", help="as seen from this site: broker and addresses of sites.NAME")


def _run_argument(command: argparse.ArgumentParser) -> None:
    command.add_argument("run", nargs="?", metavar="RUN", help="id or folder of the run (default: the newest)")


if __name__ == "__main__":
    sys.exit(main())
