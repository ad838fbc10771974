# syntax=docker/dockerfile:1
# One image for every role: the command says which (`api`, `worker`, `flower`, `db upgrade`).

ARG PYTHON_VERSION=3.11

FROM python:${PYTHON_VERSION}-slim AS build
# On a machine without a GPU, point this at PyTorch's index of CPU builds: the image is 4 GB smaller.
ARG PIP_EXTRA_INDEX_URL=""
ENV PIP_EXTRA_INDEX_URL=${PIP_EXTRA_INDEX_URL} PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
RUN python -m venv /opt/headrace
ENV PATH=/opt/headrace/bin:$PATH
WORKDIR /src
COPY . .
RUN pip install -c constraints.txt ./client .

FROM python:${PYTHON_VERSION}-slim
# The CPU kernels came compiled with the installation; g++ is for custom operations on a CPU.
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ libgomp1 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 10001 headrace \
    && install -d -o headrace -g headrace /var/lib/headrace /var/cache/headrace
COPY --from=build /opt/headrace /opt/headrace
ENV PATH=/opt/headrace/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    HEADRACE_HOME=/var/lib/headrace \
    HEADRACE_CACHE=/var/cache/headrace \
    HF_HOME=/var/cache/headrace/huggingface \
    TRITON_CACHE_DIR=/var/cache/headrace/triton \
    XDG_CACHE_HOME=/var/cache/headrace/other
USER headrace
WORKDIR /var/lib/headrace
VOLUME ["/var/lib/headrace", "/var/cache/headrace"]
EXPOSE 8000 5555 9808
ENTRYPOINT ["headrace"]
CMD ["--help"]
