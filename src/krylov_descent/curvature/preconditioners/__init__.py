"""The matrix D with which the Krylov space is made."""
