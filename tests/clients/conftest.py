"""Collects nothing here without the environment of the clients."""

from tests import ROOT

collect_ignore_glob = [] if (ROOT / ".venv-clients" / "bin" / "aiperf").exists() else ["test_*.py"]
