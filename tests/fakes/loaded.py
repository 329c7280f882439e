"""What the fork server of `tests.fakes.killed` has loaded, also what libraries load with the first use alone."""

import transformers.models.llama.modeling_llama  # noqa: F401
from transformers import AutoModelForCausalLM, AutoTokenizer, Cache  # noqa: F401

import draftstore.hf.states
import draftstore.stores.crest.build
import draftstore.stores.dresd.build
import draftstore.stores.rest.build  # noqa: F401
from draftstore.trees import batch

batch.warm_up()
