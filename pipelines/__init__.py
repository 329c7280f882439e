"""Flows that build stores on schedule: thin shells over library functions. Never imports `services`.

Prefect reads its settings when it is imported, after this module: it sends no telemetry unless the environment enables
it.
"""

import os

os.environ.setdefault("DO_NOT_TRACK", "1")
os.environ.setdefault("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
os.environ.setdefault("PREFECT_CLOUD_ENABLE_ORCHESTRATION_TELEMETRY", "false")
