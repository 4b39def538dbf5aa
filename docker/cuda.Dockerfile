# Holdfast on NVIDIA GPUs. From the checkout: docker build -f docker/cuda.Dockerfile -t holdfast:cuda .
# The host needs the driver and NVIDIA's Container Toolkit; the rest of CUDA comes with PyTorch's wheels.
FROM python:3.12-slim AS build
WORKDIR /source
RUN pip install --no-cache-dir "hatchling>=1.27"
COPY pyproject.toml README.md LICENSE CHANGELOG.md hatch_build.py ./
COPY holdfast holdfast
RUN python -m hatchling build -t wheel -d /dist

FROM python:3.12-slim
# Triton compiles a small launcher for each kernel with the C compiler.
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
RUN pip install --no-cache-dir torch==2.13.0
RUN --mount=from=build,source=/dist,target=/dist \
    wheel=$(echo /dist/holdfast-*.whl) && pip install --no-cache-dir "${wheel}[cells,cuda,hf,postgres]"
# Conversations, measured profiles and compiled kernels are kept in the volume.
ENV XDG_DATA_HOME=/data XDG_CACHE_HOME=/data/cache TRITON_CACHE_DIR=/data/cache/triton
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
RUN useradd --create-home holdfast && install -d -o holdfast /data
USER holdfast
VOLUME /data
EXPOSE 8000
HEALTHCHECK --start-period=15m CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health', timeout=5)"]
ENTRYPOINT ["holdfast"]
CMD ["serve", "--host", "0.0.0.0"]
