"""The catalogue: corpora, builds, releases and replays, as functions over a session.

    with Session(make_engine()) as session, session.begin():
        build = catalogue.add_build(session, Path("stores/chat"))
        catalogue.publish(session, "chat-vicuna", build.id)

All of them run in the caller's transaction, which the caller commits: the block takes effect as a whole or not at all.
For other queries see `schema.views`.
"""

from schema.builds import (
    CatalogueError,
    add_build,
    drop_build,
    fail_build,
    fail_cut_off,
    find_build,
    finish_build,
    get_build,
    list_builds,
    record_corpus,
    record_replay,
    start_build,
)
from schema.releases import (
    get_release,
    list_releases,
    publish,
    release_history,
    remove,
    rollback,
    verify_build,
)

__all__ = [
    "CatalogueError",
    "add_build",
    "drop_build",
    "fail_build",
    "fail_cut_off",
    "find_build",
    "finish_build",
    "get_build",
    "get_release",
    "list_builds",
    "list_releases",
    "publish",
    "record_corpus",
    "record_replay",
    "release_history",
    "remove",
    "rollback",
    "start_build",
    "verify_build",
]
