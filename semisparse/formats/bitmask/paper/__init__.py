"""The kernel of the RheoSparse paper, for comparison."""
