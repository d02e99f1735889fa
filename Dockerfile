# An image for GPU nodes: docker build -t unet3d . (docs/how-to/containers.md). For a release, name
# the base by its digest: --build-arg BASE=python:3.11-slim@sha256:...
ARG BASE=python:3.11-slim

# Wheels of everything except torch. All downloads are checked by hash. Sources are built here, with
# pinned tools, none of which is part of the final image.
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
COPY scripts/release/long_description.py scripts/release/
COPY scripts/slurm.sh scripts/
RUN /tools/bin/pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /project .

FROM ${BASE}
# At run time, Triton needs a C compiler and Python's headers, the CPU kernels a C++ compiler.
# tini, because the first process of a container ignores signals that it has no handler for.
# Packages are not pinned, because Debian keeps only the latest version of each.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ tini \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/unet3d \
    && test -e "$(python3 -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h"
ENV PATH=/opt/unet3d/bin:$PATH

# torch is several GB, so it has a layer of its own that other packages do not change.
ARG TORCH=torch==2.13.0
# hadolint ignore=DL3013
RUN pip install --no-cache-dir "${TORCH}"

# --force-reinstall replaces the unpinned dependencies of torch by the pinned ones. The lock file is
# copied because some builders do not notice changes of a mounted folder.
COPY container/requirements.txt /opt/unet3d/
RUN --mount=type=bind,from=wheels,source=/wheels,target=/wheels \
    pip install --no-cache-dir --no-index --no-deps --force-reinstall /wheels/*.whl
COPY --from=wheels /project /opt/unet3d/project
RUN pip install --no-cache-dir --no-index --no-deps /opt/unet3d/project/*.whl && pip check

# Any user that --user names can write to these two folders: /job has runs and data, /cache has
# compiled kernels (/tmp may be mounted noexec) in a private folder for each user. As volumes, they
# are writable even if the root file system is read-only and nothing is mounted.
RUN install --directory --mode=1777 /job /cache
VOLUME ["/job", "/cache"]
ENV HOME=/cache \
    USER=unet3d \
    XDG_CACHE_HOME=/cache \
    MPLCONFIGDIR=/cache/matplotlib \
    TORCHINDUCTOR_CACHE_DIR=/cache/inductor \
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
