"""How work is run: engines, ranks, precision, threads and checks of arguments."""
