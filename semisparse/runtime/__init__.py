"""Device facts, measured rates, run-time compilation of CUDA and C++, and kernel launches."""
