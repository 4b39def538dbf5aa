# Holdfast on a CPU. From the checkout: docker build -f docker/cpu.Dockerfile -t holdfast:cpu .
FROM python:3.12-slim AS build
WORKDIR /source
# Compiles the products of packed weights.
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
COPY requirements requirements
RUN pip install --no-cache-dir -c requirements/dev.txt hatchling
COPY pyproject.toml README.md LICENSE CHANGELOG.md hatch_build.py ./
COPY holdfast holdfast
RUN python -m hatchling build -t wheel -d /dist

FROM python:3.12-slim
# `make container-lock` renews the versions and hashes.
RUN --mount=type=bind,source=deploy/requirements.lock,target=/requirements.lock \
    pip install --no-cache-dir --require-hashes --no-deps -r /requirements.lock
# PyTorch's own index has the build without CUDA; PyPI's brings gigabytes of it.
RUN pip install --no-cache-dir --no-deps --index-url https://download.pytorch.org/whl/cpu torch==2.13.0
RUN --mount=from=build,source=/dist,target=/dist pip install --no-cache-dir --no-deps /dist/holdfast-*.whl
# Conversations and measured profiles are kept in the volume. Engines listen in /run/holdfast.
ENV XDG_DATA_HOME=/data XDG_CACHE_HOME=/data/cache
RUN useradd --uid 10001 --user-group --create-home holdfast && install -d -o holdfast -g holdfast /data /files /run/holdfast
USER 10001:10001
VOLUME /data
EXPOSE 8000
HEALTHCHECK --start-period=5m CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health', timeout=5)"]
ENTRYPOINT ["holdfast"]
CMD ["serve", "--host", "0.0.0.0"]
