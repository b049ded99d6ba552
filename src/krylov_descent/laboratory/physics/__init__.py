"""Equations with known solutions, for physics-informed nets."""
