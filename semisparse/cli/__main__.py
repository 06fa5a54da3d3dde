"""Run the command line as ``python -m semisparse.cli``."""

from semisparse.cli.process import run

run()
