"""Curvature products (Algorithm 1 of the paper) and the preconditioners."""
