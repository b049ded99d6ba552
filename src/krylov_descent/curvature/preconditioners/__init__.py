"""Preconditioners: the matrix D with which the Krylov space is made."""
