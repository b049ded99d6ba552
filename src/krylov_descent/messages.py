"""What an error says, quoted in another."""


def first_line(problem: Exception) -> str:
    """The first line of an error's message."""
    return str(problem).strip().splitlines()[0] if str(problem).strip() else type(problem).__name__
