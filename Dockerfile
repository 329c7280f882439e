# The image of every service except PostgreSQL, built by docker compose. The decoding worker's has other EXTRAS.
# Dependencies are installed before the code is copied, so that a code change rebuilds only small layers.
FROM python:3.11.14-slim-bookworm

ENV PYTHONUNBUFFERED=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    DO_NOT_TRACK=1 \
    PREFECT_SERVER_ANALYTICS_ENABLED=false \
    PREFECT_CLOUD_ENABLE_ORCHESTRATION_TELEMETRY=false \
    DRAFTSTORE_HOME=/var/lib/draftstore \
    HF_HOME=/var/lib/draftstore/hub \
    PREFECT_HOME=/var/lib/prefect \
    NUMBA_CACHE_DIR=/var/cache/draftstore

# Volumes start as copies of these folders, including their owner.
RUN groupadd --gid 10001 draftstore \
    && useradd --uid 10001 --gid draftstore --create-home draftstore \
    && install --directory --owner draftstore --group draftstore \
        /var/lib/draftstore /var/lib/draftstore/hub /var/lib/prefect /var/cache/draftstore /run/draftstore /answers

WORKDIR /app
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY draftstore/__init__.py draftstore/__init__.py
ARG EXTRAS=pipelines,services,quickstart
# An index of torch wheels, such as PyTorch's own for CPUs; without one, pip's index gives those for NVIDIA GPUs.
ARG TORCH_INDEX=
RUN if [ -n "$TORCH_INDEX" ]; then pip install --constraint constraints.txt --index-url "$TORCH_INDEX" torch; fi
# Editable: the packages beside draftstore are not part of its wheel.
RUN pip install --constraint constraints.txt --editable ".[${EXTRAS}]"

COPY alembic.ini ./
COPY migrations migrations
COPY draftstore draftstore
COPY schema schema
COPY pipelines pipelines
COPY services services

USER draftstore
# Compile the kernels now, not at the start of every container. (A processor of another kind compiles its own.)
RUN python -c "from services.lookup.served import load_kernels; load_kernels()"
CMD ["draftstore", "--help"]
