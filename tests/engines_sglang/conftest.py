"""Collects nothing here without SGLang."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("sglang") else ["test_*.py"]
