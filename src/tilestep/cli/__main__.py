"""`python -m tilestep.cli`, the same as `python -m tilestep`."""

from . import main

if __name__ == "__main__":
    main()
