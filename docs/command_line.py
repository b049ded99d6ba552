"""MkDocs hook: the reference of the command `ksd`, made from the command itself."""

from typing import Any

PLACE = "<!-- commands -->"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace the mark on a page by all commands."""
    return markdown.replace(PLACE, reference()) if PLACE in markdown else markdown


def reference() -> str:
    """Every command with its arguments, options and examples, as Markdown."""
    from typer.main import get_command

    from krylov_descent.cli import app

    return _command(get_command(app), "ksd")


def _command(command: Any, path: str) -> str:
    """A command, or the commands of a group."""
    if inner := getattr(command, "commands", {}):
        return "\n\n".join(_command(one, f"{path} {name}") for name, one in inner.items())
    context = command.make_context(path, [], resilient_parsing=True)
    usage = " ".join([path, *command.collect_usage_pieces(context)])
    parts = [f"## {path}", f"```text\n{usage}\n```", command.help]
    records = [one.get_help_record(context) for one in command.params]
    rows = [f"| `{name}` | {text} |" for name, text in filter(None, records)]
    if rows:
        parts.append("\n".join(["| option | what it is |", "| --- | --- |", *rows]))
    if command.epilog:
        parts.append(f"```console\n{command.epilog.removeprefix('Examples:').strip()}\n```")
    return "\n\n".join(parts)
