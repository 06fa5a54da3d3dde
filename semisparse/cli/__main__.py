"""``python -m semisparse.cli``."""

from semisparse.cli import main

main()
