"""Krylov Subspace Descent, Algorithm 3 of the paper."""
