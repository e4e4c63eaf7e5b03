"""The process of a `TemporaryBroker`: the command line, which ends when the process that started it does."""

from __future__ import annotations

import os
import signal
import sys
import threading

from headrace.cli.main import main


def _end_with_parent() -> None:
    """Nothing is ever written to the pipe: it ends when nobody holds its other end any more."""
    os.read(sys.stdin.fileno(), 1)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, daemon=True).start()
    sys.exit(main(sys.argv[1:]))
