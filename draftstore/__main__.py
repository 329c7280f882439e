"""`python -m draftstore` runs the command `draftstore`."""

from draftstore.cli import main

main()
