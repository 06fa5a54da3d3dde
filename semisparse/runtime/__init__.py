"""The machine underneath: device facts, measured rates, run-time compilation and launches."""
