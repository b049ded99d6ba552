"""The report: run folders as one HTML page that needs no network, server or library.

runs.py       what a folder holds, and the runs of one problem side by side
numbers.py    numbers and durations as text
marks.py      the colour and dash pattern of a run
summary.py    who won and by what measure, in sentences
tables.py     results beside the published numbers, time by phase, settings
charts.py     what the scripts draw, as JSON
pictures.py   reconstructions as PNG strips
fields.py     solutions of equations in colour
page.py       all of it together with page.html, page.css and the scripts
"""

from krylov_descent.laboratory.report.fields import Field
from krylov_descent.laboratory.report.page import Picture, write_report
from krylov_descent.laboratory.report.pictures import Reconstructions

__all__ = ["Field", "Picture", "Reconstructions", "write_report"]
