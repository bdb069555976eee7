"""Open registries of schedules, partitioners and weight rules.

In process: a decorator. From another installed package: an entry point of the group named below, loaded when its name
is asked for. Two owners of one name are an error, never a silent choice.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points


class Registry:
    """Names -> functions of one kind.

    Args:
        kind: what is registered, for messages ("schedule").
        group: entry-point group.
        builtin: module whose import registers this package's own entries, or None.
    """

    def __init__(self, kind: str, group: str, builtin: str | None = None):
        self.kind = kind
        self.group = group
        self._builtin = builtin
        self._entries: dict[str, Callable] = {}
        self._found: dict[str, EntryPoint] | None = None

    def register(self, name: str, function: Callable | None = None):
        """Registers ``function`` under ``name``; without a function, a decorator that does.

        Raises:
            ValueError: if the name is taken by another function.
        """
        if function is None:
            return lambda fn: self.register(name, fn)
        self._load_builtin()
        known = self._entries.get(name)
        if known is not None and known is not function:
            raise ValueError(f"the {self.kind} {name!r} is registered twice: {_where(known)} and {_where(function)}")
        if known is None and name in self._discovered():
            raise ValueError(f"the {self.kind} {name!r} is registered twice: {_where(function)} and entry point "
                             f"{self._discovered()[name].value}")
        self._entries[name] = function
        return function

    def unregister(self, name: str) -> None:
        """Forgets an in-process entry; KeyError if there is none."""
        del self._entries[name]

    def names(self) -> list[str]:
        """All known names, sorted; entry points are listed without being loaded."""
        self._load_builtin()
        return sorted({*self._entries, *self._discovered()})

    def get(self, name: str) -> Callable:
        """The function of that name.

        Raises:
            ValueError: if the name is unknown, with the nearest known names, or its entry point cannot be loaded.
        """
        self._load_builtin()
        if name not in self._entries and name in self._discovered():
            point = self._discovered()[name]
            try:
                self._entries[name] = point.load()
            except Exception as error:
                raise ValueError(f"the {self.kind} {name!r} of entry point {point.value} cannot be loaded: "
                                 f"{type(error).__name__}: {error}") from error
        try:
            return self._entries[name]
        except KeyError:
            raise ValueError(f"unknown {self.kind} {name!r}{nearest(name, self.names())}; known: "
                             f"{', '.join(self.names())}") from None

    def _load_builtin(self) -> None:
        if self._builtin is not None:
            module, self._builtin = self._builtin, None
            importlib.import_module(module)

    def _discovered(self) -> dict[str, EntryPoint]:
        if self._found is None:
            found: dict[str, EntryPoint] = {}
            for point in entry_points(group=self.group):
                other = found.get(point.name)
                if other is not None and other.value != point.value:
                    raise ValueError(f"the {self.kind} {point.name!r} is registered twice: entry points {other.value} "
                                     f"and {point.value}; uninstall one of the packages")
                if point.name in self._entries:
                    raise ValueError(f"the {self.kind} {point.name!r} is registered twice: "
                                     f"{_where(self._entries[point.name])} and entry point {point.value}")
                found[point.name] = point
            self._found = found
        return self._found


def nearest(name: str, known: list[str]) -> str:
    """``" (did you mean 'x'?)"`` if a known name is close, else an empty string."""
    close = difflib.get_close_matches(str(name), known, n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _where(function: Callable) -> str:
    return f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', function)}"


schedules = Registry("schedule", "ds_pipe_ext.schedules", "ds_pipe_ext.schedules")
partitioners = Registry("partitioner", "ds_pipe_ext.partitioners", "ds_pipe_ext.partition")
weight_rules = Registry("weight rule", "ds_pipe_ext.weight_rules")
