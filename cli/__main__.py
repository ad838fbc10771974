"""`python -m cli` is the `headrace` command."""

from cli.main import main

main()
