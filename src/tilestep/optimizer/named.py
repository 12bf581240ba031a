"""An optimizer class for every named rule, with the signature torch users know."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from ..compat import opaque
from ..rules import Rule, registry
from .optimizer import Optimizer

__all__ = ["named_optimizers"]

_COMMON = {
    name: parameter.default
    for name, parameter in inspect.signature(Optimizer.__init__).parameters.items()
    if parameter.kind is parameter.KEYWORD_ONLY
}
"""What every optimizer takes beside its rule's hyperparameters, by keyword."""


def _signature(rule: Rule) -> inspect.Signature:
    kinds = inspect.Parameter
    parameters = [kinds("self", kinds.POSITIONAL_OR_KEYWORD), kinds("params", kinds.POSITIONAL_OR_KEYWORD)]
    defaults = {**rule.hyperparameters, **rule.options, **_COMMON}
    plain = [key for key in rule.hyperparameters if key not in rule.keyword_only]
    positional = [*plain, *rule.positional]
    keyword = [key for key in (*rule.keyword_only, *rule.options, *_COMMON) if key not in positional]
    parameters += [kinds(key, kinds.POSITIONAL_OR_KEYWORD, default=defaults[key]) for key in positional]
    parameters += [kinds(key, kinds.KEYWORD_ONLY, default=defaults[key]) for key in keyword]
    return inspect.Signature(parameters)


_ARGUMENTS = f"""Args:
    params: parameters, named parameters, or param groups.
    {", ".join(_COMMON)}: as for `tilestep.Optimizer`; the others are the rule's hyperparameters.
"""


def _class_for(rule: Rule) -> type[Optimizer]:
    signature = _signature(rule)

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            bound = signature.bind(self, *args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{rule.name}() {error}") from None
        given = dict(bound.arguments)
        given.pop("self")
        Optimizer.__init__(self, given.pop("params"), rule, **given)

    __init__ = opaque(__init__)
    __init__.__signature__ = signature  # type: ignore[attr-defined]
    text = f"{inspect.cleandoc(rule.__doc__ or rule.name)}\n\n{_ARGUMENTS}"
    body = {"__init__": __init__, "__doc__": text, "__module__": "tilestep", "__qualname__": rule.name}
    return type(rule.name, (Optimizer,), body)


@functools.cache
def named_optimizers() -> dict[str, type[Optimizer]]:
    """Class name to class, for every rule in the registry when it is first called; the same classes each time."""
    return {name: _class_for(rule) for name, rule in registry.items()}
