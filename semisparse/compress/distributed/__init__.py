"""Several processes that compress a model together: how they share the work, exchange values and notice a death."""
