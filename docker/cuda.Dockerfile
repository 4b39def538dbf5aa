# Holdfast on NVIDIA GPUs. From the checkout: docker build -f docker/cuda.Dockerfile -t holdfast:cuda .
# The host needs the driver and NVIDIA's Container Toolkit; the rest of CUDA comes with PyTorch's wheels.
FROM python:3.12-slim AS build
WORKDIR /source
COPY requirements requirements
RUN pip install --no-cache-dir -c requirements/dev.txt hatchling
COPY pyproject.toml README.md LICENSE CHANGELOG.md hatch_build.py ./
COPY holdfast holdfast
RUN python -m hatchling build -t wheel -d /dist

FROM python:3.12-slim
# Triton compiles a small launcher for each kernel with the C compiler.
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
# `make container-lock` renews the versions and hashes. PyTorch comes first, because it is large and changes seldom.
RUN --mount=type=bind,source=deploy/requirements-cuda.lock,target=/requirements-cuda.lock \
    pip install --no-cache-dir --require-hashes --no-deps -r /requirements-cuda.lock
RUN --mount=type=bind,source=deploy/requirements.lock,target=/requirements.lock \
    pip install --no-cache-dir --require-hashes --no-deps -r /requirements.lock
RUN --mount=from=build,source=/dist,target=/dist pip install --no-cache-dir --no-deps /dist/holdfast-*.whl
# Conversations, measured profiles and compiled kernels are kept in the volume. Engines listen in /run/holdfast.
ENV XDG_DATA_HOME=/data XDG_CACHE_HOME=/data/cache TRITON_CACHE_DIR=/data/cache/triton
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
RUN useradd --uid 10001 --user-group --create-home holdfast && install -d -o holdfast -g holdfast /data /files /run/holdfast
USER 10001:10001
VOLUME /data
EXPOSE 8000
HEALTHCHECK --start-period=15m CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health', timeout=5)"]
ENTRYPOINT ["holdfast"]
CMD ["serve", "--host", "0.0.0.0"]
