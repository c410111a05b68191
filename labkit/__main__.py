"""The `labkit` command and `python -m labkit`: imports nothing before an interrupt can be answered."""

import sys


def main() -> None:
    """Run the command line and exit with its code; Ctrl-C ends it with one sentence at any moment.

    So does what ends a batch job or closes a terminal: temporary folders and processes go with it.
    """
    try:
        import signal

        for ending in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(ending) is signal.SIG_DFL:  # nohup ignores hang-ups
                signal.signal(ending, signal.default_int_handler)
        from labkit.cli import main as run

        run()
    except KeyboardInterrupt:
        sys.stderr.write("labkit: interrupted\n")
        sys.exit(130)


if __name__ == "__main__":
    main()
