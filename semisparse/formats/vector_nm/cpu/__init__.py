"""The CPU kernel of vector_nm."""
