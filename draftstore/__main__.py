"""`python -m draftstore`: the command `draftstore`."""

from draftstore.cli import main

main()
