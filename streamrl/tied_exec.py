"""A script: asks the kernel to signal this process when its parent ends, and becomes another program.

    python -I -S tied_exec.py PARENT_PID SIGNAL PROGRAM [ARGUMENT]...

Parents that have threads (gRPC's, librdkafka's) must not run Python between fork and exec: this does it after an exec.
It imports next to nothing, since every process that the command starts passes through here.
"""

import ctypes
import os
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    parent_pid, number, program = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), number)
    os.execvp(program, sys.argv[3:])


if __name__ == "__main__":
    main()
