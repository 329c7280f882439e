"""Flows that build stores on schedule: thin shells over library functions. Never imports `services`.

Prefect reads its settings when it is imported, after this module: flow runs send no telemetry, unless the environment
says otherwise.
"""

import os

QUIET = {
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_CLOUD_ENABLE_ORCHESTRATION_TELEMETRY": "false",
}
"""Settings that keep Prefect from any outside communication."""

for _name, _value in QUIET.items():
    os.environ.setdefault(_name, _value)
