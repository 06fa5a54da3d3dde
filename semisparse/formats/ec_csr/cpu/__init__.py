"""The CPU kernel of ec_csr."""
