"""Groups of two and three ranks, started once: loading torch takes longer than most tests."""

from collections.abc import Iterator

import pytest

from tests.distributed.group import Group


@pytest.fixture(scope="session")
def pair() -> Iterator[Group]:
    group = Group(2)
    yield group
    group.close()


@pytest.fixture(scope="session")
def trio() -> Iterator[Group]:
    group = Group(3)
    yield group
    group.close()
