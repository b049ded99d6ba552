"""The report: run folders as one HTML page that needs no network, server or library.

reading.py     a run folder, whole or damaged
runs.py        what is known of a run
methods.py     runs that differ in their seed alone, as one method with a spread
comparison.py  the methods of one problem, and the error that the time is counted to
numbers.py     numbers and durations as text
marks.py       the colour of an optimiser
bands.py       several runs as one curve with a band
drawing.py     the curves as an SVG that needs no script
charts.py      what the scripts draw, as JSON
summary.py     what the runs show, in sentences
tables.py      results, the published numbers, terms
times.py       time by phase
settings.py    all that the configurations hold
commands.py    how to make the runs again
pictures.py    reconstructions as PNG strips
fields.py      solutions of equations in colour
overview.py    the problems of a page as one table
page.py        all of it together with page.html, page.css and the scripts
"""

from krylov_descent.laboratory.report.fields import Field
from krylov_descent.laboratory.report.page import Picture, write_report
from krylov_descent.laboratory.report.pictures import Reconstructions

__all__ = ["Field", "Picture", "Reconstructions", "write_report"]
