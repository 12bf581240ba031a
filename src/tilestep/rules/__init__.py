"""Update rules, a short function each; all modules of this package are imported automatically."""

import importlib
import pkgutil

from .protocol import Interval, Rule, State, at_least, between, registry, rule
from .scalars import where

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
