"""`python -m labkit` is the `labkit` command."""

from labkit.cli import main

if __name__ == "__main__":
    main()
