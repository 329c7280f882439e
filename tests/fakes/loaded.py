"""Modules preloaded by the fork server of `tests.fakes.killed`, including those that libraries load on first use."""

import draftstore.stores.crest.build
import draftstore.stores.dresd.build
import draftstore.stores.rest.build  # noqa: F401
from draftstore.trees import batch

batch.warm_up()
