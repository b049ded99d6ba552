"""Linear layers seen from outside: what goes in, what comes out, what comes back."""
