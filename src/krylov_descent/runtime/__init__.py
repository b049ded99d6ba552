"""How work is run: the engine, processes, precision, threads, and checks of arguments."""
