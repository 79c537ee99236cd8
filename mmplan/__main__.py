"""`python -m mmplan` is the console script."""

from mmplan.cli import main

if __name__ == "__main__":
    main()
