"""The one error that people cause: it names the bad value, the allowed ones and the fix."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class CableError(ValueError):
    """A request that cannot be served. The command line prints it as one line and exits with code 2."""


def reason(error: Exception) -> str:
    """The first line of what an error of somebody else's says, without its full stop."""
    told = str(error).strip() or type(error).__name__
    return told.splitlines()[0][:300].rstrip(".")


def unknown(kind: str, value: object, allowed: Iterable[str]) -> CableError:
    """The error for a name that is not in ``allowed``, with the nearest one that is."""
    names = list(allowed)
    nearest = get_close_matches(str(value), names, n=1, cutoff=0.5)
    hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
    return CableError(f"unknown {kind} {value!r}.{hint} Allowed: {', '.join(names) or 'none'}.")


def require_known(kind: str, value: object, allowed: Iterable[str]) -> None:
    names = list(allowed)
    if value not in names:
        raise unknown(kind, value, names)
