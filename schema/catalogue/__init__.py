"""The catalogue: corpora, builds, releases, recordings and replays, as functions over a session.

    transaction = sessionmaker(make_engine()).begin
    with transaction() as session:
        build_id = catalogue.add_build(session, Path("stores/chat")).id
    releasing.publish(transaction, "chat-vicuna", build_id)

Functions that take a session run in the caller's transaction, which the caller commits: the block takes effect as a
whole or not at all. `publish` and `rollback` take a function that begins transactions, because they read a whole store
between two of them; call those of `schema.collections.releasing`, which know what was removed from collections. For
other queries see `schema.views`.
"""

from schema.catalogue.builds import (
    CatalogueError,
    add_build,
    drop_build,
    fail_build,
    fail_cut_off,
    find_build,
    finish_build,
    get_build,
    list_builds,
    record_replay,
    start_build,
)
from schema.catalogue.gates import Candidate, RefusedError, Removed, Verdict
from schema.catalogue.pruning import Pruning, prune
from schema.catalogue.publishing import Moved, publish, rollback, verify_build
from schema.catalogue.recordings import add_recording, list_recordings, remove_recording
from schema.catalogue.releases import list_releases, release_history, remove

__all__ = [
    "Candidate",
    "CatalogueError",
    "Moved",
    "Pruning",
    "RefusedError",
    "Removed",
    "Verdict",
    "add_build",
    "add_recording",
    "drop_build",
    "fail_build",
    "fail_cut_off",
    "find_build",
    "finish_build",
    "get_build",
    "list_builds",
    "list_recordings",
    "list_releases",
    "prune",
    "publish",
    "record_replay",
    "release_history",
    "remove",
    "remove_recording",
    "rollback",
    "start_build",
    "verify_build",
]
