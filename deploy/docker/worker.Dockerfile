# A worker for NVIDIA GPUs. Build from the repository's root:
#   docker build -f deploy/docker/worker.Dockerfile -t stoker-worker .
# Run it with the host's IPC namespace or enough shared memory, because engine and server process share memory:
#   docker run --gpus all --shm-size 16g -v /models:/models -p 8001:8001 stoker-worker /models/Qwen3-30B-A3B --host 0.0.0.0 \
#     --port 8001 --secret-file /run/secrets/stoker
# This image has not been built where it was written: that machine has no access to base images.
FROM python:3.12-slim
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev libibverbs1 libnuma1 \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY stoker stoker
# torch's wheels for Linux bring the CUDA libraries. Triton compiles its launchers with gcc.
RUN pip install --no-cache-dir '.[gpu,mooncake,encryption]' \
    && rm -rf /source \
    && useradd --system --create-home --uid 10001 stoker
USER stoker
WORKDIR /home/stoker
EXPOSE 8001
STOPSIGNAL SIGTERM
ENTRYPOINT ["stoker", "serve"]
CMD ["--help"]
