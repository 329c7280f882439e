"""Every error that draftstore raises on purpose: one base class, small named kinds.

A message names what was found, what was expected, and what to do about it. The command line prints the
message alone; a library user catches `DraftstoreError` or the kind that matters. `require_limits` refuses numbers out
of range; `counted` and `type_name` help to word messages.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager


class DraftstoreError(Exception):
    """Base of all errors that draftstore raises on purpose."""


class CorpusError(DraftstoreError):
    """A corpus cannot be read: no such path, unknown format, a bad record under `strict`, nothing in it."""


class NoTextError(CorpusError):
    """A corpus was read to its end and holds no text."""


class TokenizerError(DraftstoreError):
    """A tokenizer cannot be loaded, or it is not the one that a store was built with."""


class ModelError(DraftstoreError):
    """A target model cannot be loaded, or it cannot decode with drafts."""


class DecodingError(DraftstoreError):
    """A way of generating that drafts cannot serve: beams, several texts at once, a cache that cannot go back."""


class ProbabilityError(DraftstoreError):
    """The settings of a request leave no finite probabilities: a penalty, bias or temperature is extreme."""


class CurveError(DraftstoreError):
    """A cost curve cannot be read, is none, or was measured for another model or device."""


class TokenRangeError(DraftstoreError):
    """A token id lies outside [0, vocab_size)."""


class StoreError(DraftstoreError):
    """A store cannot be opened: not a store, unknown version, missing, cut or changed file."""


class BuildError(DraftstoreError):
    """A build cannot go on: the output exists, another build runs there, nothing to build from."""


class DraftTreeError(DraftstoreError):
    """Arrays or bytes that are not a valid draft tree."""


class ReplayError(DraftstoreError):
    """A replay file cannot be used: a bad record, no row left after the filters."""


class WireError(DraftstoreError):
    """Bytes that are not a frame of the lookup service, or a request that no frame can carry."""


class LookupServiceError(DraftstoreError):
    """The lookup service is away, or refuses: unknown release, wrong token, another tokenizer."""


class MissingPluginError(DraftstoreError):
    """What another package brings is needed, and that package or what it needs is absent."""


class MissingExtraError(DraftstoreError):
    """An optional dependency is needed and absent; the message says which extra brings it."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"the package {package!r} is not installed: pip install 'draftstore[{extra}]'")


def counted(number: int, noun: str) -> str:
    """Return `1 record`, or `2 records`."""
    return f"{number:,} {noun}" + "s" * (number != 1)


def require_limits(
    what: str,
    limits: Mapping[str, tuple[float, float, float | None]],
    error: type[DraftstoreError] = DraftstoreError,
    *,
    digits: str = "",
) -> None:
    """Refuse the first number that is not within its limits.

    Args:
        what: has these numbers, for the message: `a drafting rule`.
        limits: by name, the number, the least and the most that it may be; None is no most.
        error: what is raised.
        digits: how numbers are written, `,` for groups of three digits.
    """
    for name, (value, least, most) in limits.items():
        if not least <= value or (most is not None and not value <= most):
            expected = (
                f"at least {least:{digits}}" if most is None else f"{least:{digits}} to {most:{digits}}"
            )
            raise error(f"{what} with {name} = {value:{digits}}: expected {expected}")


def type_name(value: object) -> str:
    """Return the type of a value with its article: `a str`, `an int`."""
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


@contextmanager
def needs_extra(package: str, extra: str = "build") -> Iterator[None]:
    """Turn a failed import of an optional package inside the block into `MissingExtraError`."""
    try:
        yield
    except ModuleNotFoundError:
        raise MissingExtraError(package, extra) from None
