"""The process of the length ranker: learns and forecasts for as long as the scheduler lives.

    python -m scheduler_svc.ranker.worker SCHEDULER_PID SOCKET FOLDER SEED [BASE_MODEL]

It has the lowest priority and one thread for arithmetic, and sleeps when nothing is to be done. What is to be scored
comes before what is to be learned. When the socket ends it keeps what it knows and ends, too. What is said is in
messages.py, the scheduler's side in process.py.
"""

import json
import logging
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scheduler_svc.ranker.examples import Example, Examples
from scheduler_svc.ranker.messages import LEAST_EXAMPLES, example_of_json, example_to_json, line, lines
from streamrl.lifetime import die_with_parent
from streamrl.logs import set_up_logs

if TYPE_CHECKING:
    from scheduler_svc.ranker.learner import LengthLearner

logger = logging.getLogger(__name__)

_LOWEST_PRIORITY = 19
_STEPS_AN_EXAMPLE = 0.5
"""Each prompt is looked at some thirty times."""
_FIRST_STEPS = 100
_MOST_STEPS_OWED = 400
_STEPS_AT_ONCE = 5
"""Between them it looks whether something is to be scored."""
_KEEP_EVERY_S = 30.0


class Worker:
    """The loop. What it owes are steps: so many for each example that comes."""

    def __init__(self, connection: socket.socket, folder: Path, base_model: str, seed: int) -> None:
        self._connection = connection
        self._folder = folder
        self._base_model = base_model
        self._learner = _new_learner(base_model, seed)
        self._examples = Examples()
        self._requests: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._steps_owed = 0.0
        self._kept_s = time.monotonic()
        self._kept_steps = 0
        self._said_steps = 0
        self._ended = threading.Event()

    def run(self) -> None:
        """Serves until the scheduler closes the socket."""
        self._restore()
        threading.Thread(target=self._receive, name="requests", daemon=True).start()
        while True:
            try:
                request = self._requests.get(block=self._steps_owed < 1)
            except queue.Empty:
                self._learn()
                continue
            if request is None or self._ended.is_set():
                self._keep()
                return
            if "score" in request:
                self._score(request["score"])
            for example in request.get("learn", ()):
                self._take(example_of_json(example))

    def _receive(self) -> None:
        with self._connection.makefile("r", encoding="utf-8") as messages:
            try:
                for message in messages:
                    self._requests.put(json.loads(message))
            except OSError:
                pass  # the scheduler has died, and this process is about to
        # What is still in the queue has nobody who would ask for it.
        self._ended.set()
        self._requests.put(None)

    def _say(self, messages: Iterable[bytes]) -> None:
        try:
            for message in messages:
                self._connection.sendall(message)
        except OSError:
            logger.debug("nobody listens any more")

    def _take(self, example: Example) -> None:
        self._examples.add(example)
        if len(self._examples) < LEAST_EXAMPLES:
            return
        if self._learner.num_steps == 0 and self._steps_owed == 0:
            self._steps_owed = _FIRST_STEPS
        self._steps_owed = min(self._steps_owed + _STEPS_AN_EXAMPLE, _MOST_STEPS_OWED)

    def _learn(self) -> None:
        num_steps = min(_STEPS_AT_ONCE, int(self._steps_owed))
        self._learner.learn(self._examples.all(), num_steps)
        self._steps_owed -= num_steps
        # Where answers come faster than they can be learned from, there is no end to wait for.
        if self._steps_owed < 1 or self._learner.num_steps - self._said_steps >= _FIRST_STEPS:
            self._say_learned()
            if time.monotonic() - self._kept_s > _KEEP_EVERY_S:
                self._keep()

    def _say_learned(self) -> None:
        self._said_steps = self._learner.num_steps
        self._say([line({"learned": len(self._examples), "steps": self._learner.num_steps})])

    def _score(self, prompts: list[tuple[str, list[int]]]) -> None:
        found = self._learner.forecast([token_ids for _, token_ids in prompts]).round(2).tolist()
        scored = [(prompt_id, lengths) for (prompt_id, _), lengths in zip(prompts, found, strict=True)]
        self._say(lines("forecasts", scored))

    def _restore(self) -> None:
        from scheduler_svc.ranker.kept import load_ranker

        try:
            examples = load_ranker(self._folder, self._base_model, self._learner)
        except FileNotFoundError:
            return
        except ValueError as error:
            logger.warning("the length ranker begins anew: %s", error)
            return
        for example in examples:
            self._examples.add(example)
        logger.info("the length ranker goes on after %d steps on %d prompts", self._learner.num_steps, len(examples))
        self._say(lines("restored", map(example_to_json, examples)))
        self._kept_steps = self._learner.num_steps
        if self._learner.num_steps:
            self._say_learned()

    def _keep(self) -> None:
        """In the run's folder; what cannot be kept is lost to a resumed run, and nothing else."""
        from scheduler_svc.ranker.kept import save_ranker

        self._kept_s = time.monotonic()
        if self._learner.num_steps == self._kept_steps:
            return
        try:
            save_ranker(self._folder, self._base_model, self._learner, self._examples.all())
            self._kept_steps = self._learner.num_steps
        except OSError as error:
            logger.warning("the length ranker could not be kept: %s", error)


def _new_learner(base_model: str, seed: int) -> "LengthLearner":
    import torch

    from scheduler_svc.ranker.learner import LengthLearner

    torch.set_num_threads(1)
    return LengthLearner(base_model, seed)


def main() -> None:
    scheduler_pid, descriptor, folder, seed, *base_model = sys.argv[1:]
    die_with_parent(int(scheduler_pid))
    os.nice(_LOWEST_PRIORITY)
    set_up_logs("length-ranker", "INFO")
    try:
        Worker(socket.socket(fileno=int(descriptor)), Path(folder), "".join(base_model), int(seed)).run()
    except (ValueError, OSError, ImportError) as error:
        # A base model that is not there or has other tokens, or no torch: the scheduler goes on without.
        logger.error("the length ranker ends: %s", error)
        sys.exit(1)


if __name__ == "__main__":
    main()
