"""The catalogue: corpora, builds, releases, recordings and replays, as functions over a session.

    transaction = sessionmaker(make_engine()).begin
    with transaction() as session:
        build_id = add_build(session, Path("stores/chat")).id
    publish(transaction, "chat-vicuna", build_id)

Functions that take a session run in the caller's transaction, which the caller commits: the block takes effect as a
whole or not at all. `publish` and `rollback` take a function that begins transactions, because they read a whole store
between two of them; call those of `schema.collections.proving`, which know what was removed from collections. For
other queries see `schema.views`.
"""
