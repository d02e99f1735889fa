# syntax=docker/dockerfile:1
# docker build -t unet3d . && docker run --gpus all --shm-size=8g -v $PWD:/job unet3d train
ARG BASE=python:3.11-slim

FROM ${BASE} AS wheel
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY unet3d unet3d
COPY conf conf
COPY scripts/long_description.py scripts/
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM ${BASE}
ARG TORCH=torch==2.11.0
# Triton compiles its kernels at run time: it needs a C compiler and Python's headers.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
# torch has a layer of its own, so that a new version of the project does not fetch it again
RUN pip install --no-cache-dir "${TORCH}"
COPY --from=wheel /wheels /wheels
RUN pip install --no-cache-dir /wheels/*.whl && rm -rf /wheels
RUN useradd --create-home --uid 1000 unet3d && mkdir /job && chown unet3d /job
ENV TRITON_CACHE_DIR=/tmp/triton TORCHINDUCTOR_CACHE_DIR=/tmp/inductor
USER unet3d
WORKDIR /job
ENTRYPOINT ["unet3d"]
CMD ["train"]
