"""`python -m vitflow` is the command line, where the command itself is not on the path."""

from vitflow.cli import main

if __name__ == "__main__":
    main()
