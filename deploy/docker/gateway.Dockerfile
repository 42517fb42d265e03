# A gateway: no PyTorch, about 200 MB. Build from the repository's root:
#   docker build -f deploy/docker/gateway.Dockerfile -t stoker-gateway .
# This image has not been built where it was written: that machine has no access to base images.
FROM python:3.12-slim AS build
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY stoker stoker
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.12-slim
COPY deploy/docker/gateway-requirements.txt /tmp/
COPY --from=build /wheels /wheels
# --no-deps: the package also requires PyTorch, which a gateway does not use.
RUN pip install --no-cache-dir -r /tmp/gateway-requirements.txt \
    && pip install --no-cache-dir --no-deps /wheels/*.whl \
    && useradd --system --create-home --uid 10001 stoker
USER stoker
WORKDIR /home/stoker
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=3s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=2)"]
ENTRYPOINT ["stoker", "gateway"]
CMD ["--host", "0.0.0.0", "--port", "8000"]
