"""Reads rendered reports in tests."""

import csv
import io

from attncheck.reporting.measurement_document import measurement_document
from attncheck.reporting.terminal import PLAIN_WIDTH, plain_text


def as_table(report, width=PLAIN_WIDTH):
    return plain_text(measurement_document(report), width)


def csv_rows(text):
    return list(csv.DictReader(io.StringIO(text)))
