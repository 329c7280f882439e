"""What the fork server of `tests.fakes.killed` has loaded, also what libraries load with the first use alone."""

import draftstore.stores.crest.build
import draftstore.stores.dresd.build
import draftstore.stores.rest.build  # noqa: F401
from draftstore.trees import batch

batch.warm_up()
