# Two images from one wheel. `make image` builds both; by hand: uv build --wheel && docker build --target operator .
# The base must bring Python 3.11 with pip. Where there is no index, PIP_FIND_LINKS names a folder of wheels.
ARG BASE_IMAGE=python:3.11-slim-bookworm

FROM ${BASE_IMAGE} AS base
# a module beside a script must never stand in for a library
ENV PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1
# user names are looked up by libraries that make cache folders
RUN groupadd --gid 65532 refit && useradd --uid 65532 --gid 65532 --create-home refit

FROM base AS operator
ARG PIP_NO_INDEX PIP_FIND_LINKS PIP_BREAK_SYSTEM_PACKAGES=1
COPY requirements/operator.txt /opt/refit/
RUN python3 -m pip install --no-cache-dir -r /opt/refit/operator.txt
COPY dist/refit-*.whl /opt/refit/
RUN python3 -m pip install --no-cache-dir --no-deps --no-index /opt/refit/refit-*.whl
USER 65532:65532
ENTRYPOINT ["python3", "-m", "refit_operator"]

# For trainers and generators; torch, the engine and nixl come from the host image or a mounted folder.
FROM base AS runtime
ARG PIP_NO_INDEX PIP_FIND_LINKS PIP_BREAK_SYSTEM_PACKAGES=1
# what engines link to and a slim base lacks; empty where the base brings it
ARG SYSTEM_PACKAGES="libgomp1 libnuma1"
RUN [ -z "$SYSTEM_PACKAGES" ] || (apt-get update && apt-get install --yes --no-install-recommends $SYSTEM_PACKAGES && rm -rf /var/lib/apt/lists/*)
COPY requirements/runtime.txt /opt/refit/
RUN python3 -m pip install --no-cache-dir -r /opt/refit/runtime.txt
COPY dist/refit-*.whl /opt/refit/
RUN python3 -m pip install --no-cache-dir --no-deps --no-index /opt/refit/refit-*.whl
USER 65532:65532
CMD ["refit", "doctor"]
