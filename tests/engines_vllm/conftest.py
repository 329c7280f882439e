"""The variables that vLLM reads when it is imported; without vLLM, nothing is collected here."""

import os
from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("vllm") else ["test_*.py"]

# The engine runs in this process, on one thread: the test looks into it, and two threads wait for each other.
os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DRAFTSTORE_ADAPTIVE": "false",  # as many passes as the replay predicts
}
