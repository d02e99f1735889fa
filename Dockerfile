# A GPU node's image: docker build -t unet3d . (README, "In a container"). A release names its base
# by digest: --build-arg BASE=python:3.11-slim@sha256:...
ARG BASE=python:3.11-slim

# Wheels of everything but torch. Files are fetched by hash alone; what comes as source is built
# here, by tools that are pinned too, and nothing of them gets any further.
FROM ${BASE} AS wheels
COPY container /container
RUN python3 -m venv /tools \
    && /tools/bin/pip install --no-cache-dir --require-hashes --no-deps -r /container/build.txt
RUN /tools/bin/pip wheel --no-cache-dir --require-hashes --no-deps --no-build-isolation \
        --use-pep517 --wheel-dir /wheels -r /container/requirements.txt
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY unet3d unet3d
COPY conf conf
COPY scripts/long_description.py scripts/
RUN /tools/bin/pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /project .

FROM ${BASE}
# Triton needs a C compiler and Python's headers at run time, the kernels for CPUs a C++ compiler.
# tini: the first process of a container is deaf to signals that it has no handler for.
# Debian keeps one version of a package, so that one that is pinned cannot be had for long.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ tini \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/unet3d \
    && test -e "$(python3 -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h"
ENV PATH=/opt/unet3d/bin:$PATH

# Several GB, in a layer of its own: a new version of ours, or of the rest, does not fetch it again.
ARG TORCH=torch==2.13.0
# hadolint ignore=DL3013
RUN pip install --no-cache-dir "${TORCH}"

# --force-reinstall: what torch brought along unpinned makes way for what was fetched by hash. The
# lock is copied for those builders that would not see that what they mount has changed.
COPY container/requirements.txt /opt/unet3d/
RUN --mount=type=bind,from=wheels,source=/wheels,target=/wheels \
    pip install --no-cache-dir --no-index --no-deps --force-reinstall /wheels/*.whl
COPY --from=wheels /project /opt/unet3d/project
RUN pip install --no-cache-dir --no-index --no-deps /opt/unet3d/project/*.whl && pip check

# Whoever --user names, with a home or without, may write in these two: runs and volumes lie in
# /job, what is compiled on the way in /cache (not in /tmp: `--tmpfs /tmp` is noexec). As volumes
# they can be written even where the root cannot and nothing is mounted.
RUN install --directory --mode=1777 /job /cache
VOLUME ["/job", "/cache"]
ENV HOME=/cache \
    USER=unet3d \
    XDG_CACHE_HOME=/cache \
    MPLCONFIGDIR=/cache/matplotlib \
    TORCHINDUCTOR_CACHE_DIR=/cache/inductor \
    TRITON_CACHE_DIR=/cache/triton \
    PYTHONUNBUFFERED=1 \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
ARG BASE
ARG REVISION=unknown
LABEL org.opencontainers.image.title="unet3d" \
    org.opencontainers.image.description="Multiclass 3D U-Nets on volumes" \
    org.opencontainers.image.licenses="MIT" \
    org.opencontainers.image.base.name="${BASE}" \
    org.opencontainers.image.revision="${REVISION}"
USER 1000:1000
WORKDIR /job
ENTRYPOINT ["tini", "-s", "--", "unet3d"]
CMD ["train"]
