from pathlib import Path

import numpy as np
import pytest

from krylov_descent.laboratory.arff import read_arff
from krylov_descent.laboratory.sources import DataError

HEADER = """@relation games

@attribute Pool numeric
@attribute Spire numeric
@attribute build {Rush,Mass}
"""


def written(tmp_path: Path, content: str) -> Path:
    path = tmp_path / "games.arff"
    path.write_text(content)
    return path


def test_columns_classes_and_rows_are_read(tmp_path: Path) -> None:
    content = f"% a comment\n{HEADER}\n@data\n3015,-1,Mass\n\n% another\n 12 , 7.5 , Rush \n"
    found = read_arff(written(tmp_path, content))
    assert found.columns == ("Pool", "Spire")
    assert found.classes == ("Rush", "Mass")
    np.testing.assert_array_equal(found.values, [[3015, -1], [12, 7.5]])
    assert found.labels.tolist() == [1, 0]


def test_keywords_are_read_in_any_case(tmp_path: Path) -> None:
    content = "@RELATION g\n@ATTRIBUTE Pool REAL\n@Attribute build { Rush, Mass }\n@DATA\n1,Mass\n"
    found = read_arff(written(tmp_path, content))
    assert (found.columns, found.classes) == (("Pool",), ("Rush", "Mass"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (f"{HEADER}@data\n1,2,Rush\n1,Rush\n", "line 8: expected 3 fields, found 2"),
        (f"{HEADER}@data\n1,2,3,Rush\n", "line 7: expected 3 fields, found 4"),
        (f"{HEADER}@data\n\n% gap\n1,soon,Rush\n", "line 9: Spire must be a number, found 'soon'"),
        (f"{HEADER}@data\n?,2,Rush\n", r"line 7: Pool must be a number, found '\?'"),
        (f"{HEADER}@data\n1,nan,Rush\n", "line 7: Spire must be a number, found 'nan'"),
        (f"{HEADER}@data\n1,2,Expand\n", "line 7: unknown class 'Expand', the header has Rush, M"),
        (f"{HEADER}1,2,Rush\n", "there is no line @data"),
        (f"{HEADER}oops\n@data\n1,2,Rush\n", "line 6: expected an @attribute .* found 'oops'"),
        (f"{HEADER}@attribute when date\n@data\n", "line 6: expected an @attribute"),
        (f"{HEADER}@attribute last numeric\n@data\n1,2,Rush,3\n", "and then one with the classes"),
        (f"{HEADER}@data\n", "has no rows"),
    ],
)
def test_what_is_wrong_is_named_with_file_and_line(
    tmp_path: Path, content: str, message: str
) -> None:
    path = written(tmp_path, content)
    with pytest.raises(DataError, match=message) as caught:
        read_arff(path)
    assert str(path) in str(caught.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"Cannot read .*nothing\.arff: No such file"):
        read_arff(tmp_path / "nothing.arff")
