"""What was set and where it ran: all that the configurations hold."""

import json
from collections.abc import Iterable
from html import escape

from krylov_descent.laboratory.report.methods import Method
from krylov_descent.laboratory.report.numbers import NOTHING
from krylov_descent.laboratory.report.tables import scrolling

# These have a table of their own on the page.
SHOWN = ("problem: published",)


def settings_table(methods: Iterable[Method]) -> str:
    """Every key of config.json with its value, a column for each method; empty without any.

    Where a method's runs differ in a value, all of their values are shown, in the order of seeds.
    """
    there = [
        (method.label, [_flat("", run.config) for run in method.runs if run.config])
        for method in methods
    ]
    there = [(label, settings) for label, settings in there if settings]
    if not there:
        return ""
    keys = dict.fromkeys(key for _, settings in there for setting in settings for key in setting)
    groups = list(dict.fromkeys(map(_group, keys)))
    head = "".join(f'<th scope="col">{escape(label)}</th>' for label, _ in there)
    body = []
    for key in sorted(keys, key=lambda key: groups.index(_group(key))):
        cells = "".join(
            f"<td>{escape(', '.join(dict.fromkeys(s.get(key, NOTHING) for s in settings)))}</td>"
            for _, settings in there
        )
        body.append(f'<tr><th scope="row">{escape(key)}</th>{cells}</tr>')
    return scrolling(
        "Settings and environment",
        f'<table class="settings"><thead><tr><th scope="col">Setting</th>{head}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table>",
    )


def _flat(name: str, value: object) -> dict[str, str]:
    """Nested names as one level: {"limits: seconds": "60"}."""
    if name in SHOWN:
        return {}
    if not isinstance(value, dict) or not value:
        return {name: _text(value)}
    flat: dict[str, str] = {}
    for key, item in value.items():
        flat |= _flat(f"{name}: {key}" if name else str(key), item)
    return flat


def _text(value: object) -> str:
    if value is None or value == {}:
        return "none"
    return value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False)


def _group(key: str) -> str:
    return key.partition(":")[0]
