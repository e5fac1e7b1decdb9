"""`python -m elastable` is the `elastable` command."""

from elastable.command import main

main()
