"""Without the environment of the clients nothing is collected here."""

from tests import ROOT

collect_ignore_glob = [] if (ROOT / ".venv-clients" / "bin" / "aiperf").exists() else ["test_*.py"]
