"""`python -m krylov_descent` is the command `ksd`."""

from krylov_descent.cli import main

if __name__ == "__main__":
    main()
