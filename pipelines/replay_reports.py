"""Reports of publishing for the pages of flow runs: why a release did not move, and what its recordings say."""

from collections.abc import Mapping, Sequence
from typing import Any

from pipelines.reports import Built


def refusal_markdown(
    release: str, built: Built, refusals: Mapping[str, str], replays: Sequence[Mapping[str, Any]] = ()
) -> str:
    """Return the page of a publishing that was refused.

    Args:
        release: name of the release, which stays where it is.
        built: the refused build.
        refusals: reasons by check.
        replays: what both builds did with recordings: `schema.gates.replay_rows`.
    """
    rows = [f"| {check} | {reason.replace('|', '/')} |" for check, reason in refusals.items()]
    return "\n".join(
        [
            f"# Release `{release}` was not moved",
            "",
            f"Build {built.build_id} in `{built.path}` does not go live:",
            "",
            "| check | reason |",
            "|---|---|",
            *rows,
            "",
            f"If that is meant, publish it: `draftstore releases publish {release} {built.build_id} "
            f"--force {','.join(refusals)}`, or run the flow with `force`.",
            "",
            *_replays(replays),
        ]
    )


def replays_markdown(
    release: str,
    built: Built,
    replays: Sequence[Mapping[str, Any]],
    said: Sequence[str] = (),
) -> str:
    """Return the page of a publishing that replayed recordings.

    Args:
        release: name of the release, which has moved.
        built: its build.
        replays: what both builds did with recordings: `schema.gates.replay_rows`.
        said: sentences about its publishing.
    """
    head = [
        f"# Release `{release}` points at build {built.build_id}",
        "",
        *(f"- {each}" for each in said),
        "",
    ]
    return "\n".join([*head, *_replays(replays)])


def _replays(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the table of replays as lines; none without replays."""
    if not rows:
        return []
    table = [
        f"| {row['recording']} | {row['as']} | {row['build']} | {row['accepted_length']:.3f} |"
        for row in rows
    ]
    return [
        "| recording | | build | accepted length |",
        "|---|---|--:|--:|",
        *table,
        "",
    ]
