"""An extension of griffe: doctests of the package's docstrings become blocks of examples."""

from __future__ import annotations

import re
import textwrap
from typing import Any

import griffe

BARE = re.compile(r"^(>>> .*(?:\n.+)*)", re.MULTILINE)


class Doctests(griffe.Extension):
    """Name sections of examples as griffe knows them, and make sections of doctests that stand in none."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            text = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
            obj.docstring.value = BARE.sub(lambda test: "Examples:\n" + textwrap.indent(test[1], "    "), text)
