"""One process that the command started, as asyncio sees it: its end wakes us, nothing polls."""

import asyncio
import contextlib
import os
import signal
import subprocess

from streamrl.lifetime import ProcessIdentity


class ChildProcess:
    """A running child in a session of its own (as `streamrl.lifetime.spawn` starts it), until it is reaped.

    When it ends, whatever it left in its process group is killed.
    """

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        """Call it with a running event loop."""
        self._process = process
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[int] = self._loop.create_future()
        self.identity = ProcessIdentity.of(process.pid) or ProcessIdentity(process.pid, 0)
        self._pidfd = os.pidfd_open(process.pid)
        self._loop.add_reader(self._pidfd, self._reap)

    @property
    def is_running(self) -> bool:
        return not self._ended.done()

    async def wait(self) -> int:
        """The exit code, or minus the number of the signal that killed it."""
        return await asyncio.shield(self._ended)

    async def end(self, grace_s: float) -> int:
        """SIGTERM, then after `grace_s` SIGKILL to all of its group. Returns as `wait`."""
        self.terminate()
        try:
            return await asyncio.wait_for(self.wait(), grace_s)
        except TimeoutError:
            self.kill()
            return await self.wait()

    def terminate(self) -> None:
        """Asks it to end."""
        if self.is_running:
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Ends it, and all of its group, at once."""
        if self.is_running:
            self._kill_group()

    def _reap(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        # It has ended and is not yet waited for: until then no other group can have its id.
        self._kill_group()
        self._ended.set_result(self._process.wait())

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
