"""Reads rendered reports in tests."""

import csv
import io

from attncheck.reporting.gate_document import gate_page
from attncheck.reporting.html import html_text
from attncheck.reporting.measurement_document import measurement_document
from attncheck.reporting.terminal import PLAIN_WIDTH, plain_text


def as_table(report, width=PLAIN_WIDTH):
    return plain_text(measurement_document(report), width)


def as_html(report, scripts=None):
    """The page of a gate, with the scripts of failures by their ids."""
    return html_text(gate_page(report, scripts or {}))


def csv_rows(text):
    return list(csv.DictReader(io.StringIO(text)))
