"""`python -m app`, which is what `./fencepost` becomes."""

import os
import signal

if __name__ == "__main__":
    # Before all imports, which Ctrl-C would end with a traceback; `./fencepost` has held it back until here.
    # A verb that has something to end sets its own handler.
    signal.signal(signal.SIGINT, lambda number, frame: os._exit(130))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])

    from app.cli import main

    main()
