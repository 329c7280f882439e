"""All errors that draftstore raises deliberately: one base class, small named kinds.

A message states what was found, what was expected, and what to do about it. Options to change are named beside it, so
that a command spells them `--max-n` and a flow `the parameter max_n`. Library users catch `DraftstoreError` or a
specific kind. `require_limits` refuses numbers out of range; `counted` and `type_name` help to word messages.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager


class DraftstoreError(Exception):
    """Base of all errors that draftstore raises deliberately.

    Attributes:
        exit_code: exit status of the command line.
    """

    exit_code = 1

    def __init__(self, message: str = "", *options: str) -> None:
        """Say what is wrong, and name the options to change, as in Python."""
        super().__init__(message, *options)

    def spelled(self, spell: Callable[[str], str]) -> str:
        """Return the message with the options as users spell them."""
        message, *options = self.args
        return f"{message} ({', '.join(map(spell, options))})" if options else str(message)

    def __str__(self) -> str:
        return self.spelled(str)


class CorpusError(DraftstoreError):
    """A corpus cannot be read: no such path, unknown format, a bad record under `strict`, or empty."""


class TruncatedCorpusError(CorpusError):
    """A file of a corpus is truncated or damaged, so that the rest of it would be missing."""

    exit_code = 4


class EarlierVersionError(CorpusError):
    """A scan, removal or live log is of an earlier version, which knew documents by other digests."""


class NoTextError(CorpusError):
    """A corpus was read completely and has no text."""


class TokenizerError(DraftstoreError):
    """A tokenizer cannot be loaded, or differs from the store's."""


class ModelError(DraftstoreError):
    """A target model cannot be loaded, or does not support speculative decoding."""


class DecodingError(DraftstoreError):
    """A mode of generation without support for drafts: beam search, several texts at once, a cache without rollback."""


class GrammarError(DraftstoreError):
    """A JSON schema is invalid or not supported, or an answer cannot follow it."""


class ProbabilityError(DraftstoreError):
    """An extreme penalty, bias or temperature in a request leaves no finite probabilities."""


class CurveError(DraftstoreError):
    """A cost curve cannot be read, is invalid, or was measured for another model or device."""


class TokenRangeError(DraftstoreError):
    """A token id is outside [0, vocab_size)."""


class StoreError(DraftstoreError):
    """A store cannot be opened: not a store, unknown version, missing, truncated or changed file."""


class BuildError(DraftstoreError):
    """A build cannot continue: the output exists, another build is running there, or there is nothing to build from."""


class BuildRunningError(BuildError):
    """Another process is building in the same directory."""


class DraftTreeError(DraftstoreError):
    """Arrays or bytes that are not a valid draft tree."""


class ReplayError(DraftstoreError):
    """A replay file cannot be used: it has a bad record, or no records pass the filters."""


class WireError(DraftstoreError):
    """Bytes that are not a frame of the lookup service, or a request that does not fit in one."""


class LookupServiceError(DraftstoreError):
    """The lookup service is down or refuses: unknown release, wrong token, another tokenizer."""


class EngineError(DraftstoreError):
    """The settings of a drafter inside an engine are invalid, or the engine lacks something they require."""


class MissingPluginError(DraftstoreError):
    """A required plugin's package, or a dependency of it, is missing."""


class MissingExtraError(DraftstoreError):
    """An optional dependency is missing; the message names the extra that installs it."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"the package {package!r} is not installed: pip install 'draftstore[{extra}]'")
        self._named = package, extra

    def __reduce__(self) -> tuple[type["MissingExtraError"], tuple[str, str]]:
        return type(self), self._named


def counted(number: int, noun: str) -> str:
    """Return a count with its noun: `1 record`, `2 records`."""
    return f"{number:,} {noun}" + "s" * (number != 1)


def require_limits(
    what: str,
    limits: Mapping[str, tuple[float, float, float | None]],
    error: type[DraftstoreError] = DraftstoreError,
    *,
    digits: str = "",
) -> None:
    """Refuse the first number outside its limits.

    Args:
        what: owner of the numbers, for the message: `a drafting rule`.
        limits: the number, its minimum and its maximum by name; None: no maximum.
        error: error class to raise.
        digits: number format; `,` separates thousands.
    """
    for name, (value, least, most) in limits.items():
        if not least <= value or (most is not None and not value <= most):
            expected = (
                f"at least {least:{digits}}" if most is None else f"{least:{digits}} to {most:{digits}}"
            )
            raise error(f"{what} with {name} = {value:{digits}}: expected {expected}")


def require_vocabulary(size: int) -> None:
    """Refuse a vocabulary whose ids do not fit in int32."""
    if not 1 <= size < 2**31:
        raise TokenRangeError(f"a vocabulary of {size:,} ids: expected 1 to {2**31 - 1:,}")


def type_name(value: object) -> str:
    """Return the type of a value with an article: `a str`, `an int`."""
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


@contextmanager
def needs_extra(package: str, extra: str = "build") -> Iterator[None]:
    """Turn a failed import of an optional package inside the block into `MissingExtraError`."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise MissingExtraError(error.name or package, extra) from None
