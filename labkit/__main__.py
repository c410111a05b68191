"""The `labkit` command and `python -m labkit`: imports nothing before an interrupt can be answered."""

import sys


def main() -> None:
    """Run the command line and exit with its code; Ctrl-C ends it with one sentence at any moment."""
    try:
        from labkit.cli import main as run

        run()
    except KeyboardInterrupt:
        sys.stderr.write("labkit: interrupted\n")
        sys.exit(130)


if __name__ == "__main__":
    main()
