"""`python -m tilestep.cli`: as `python -m tilestep`."""

from . import main

if __name__ == "__main__":
    main()
