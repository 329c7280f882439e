"""`draftstore generate`: one answer of a model, decoded with drafts, and how much sooner that is."""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from draftstore.assembly import Sources, assemble
from draftstore.cli.answering import Answer, Printer, Request, Sampling, decode
from draftstore.cli.common import json_option, print_json, printable, status, stderr_console
from draftstore.cli.sources import Effort, effort_options, source_options
from draftstore.errors import DraftstoreError
from draftstore.tokenizer import TextTokenizer

if TYPE_CHECKING:
    from draftstore.hf.loading import LoadedModel

DTYPES = ("auto", "float32", "float64", "bfloat16", "float16")
ATTENTIONS = ("sdpa", "eager", "flex_attention")
