# The server in a container, on CPU or, with `--gpus all`, on an NVIDIA GPU:
#
#   docker build -t smelt .
#   docker run --rm -p 127.0.0.1:8000:8000 -v "$PWD/small:/models/small:ro" smelt serve small --host 0.0.0.0
#   docker run --rm --user "$(id -u)" -e HOME=/tmp -v "$PWD:/models" smelt compress smollm2-135m -r examples/prune-20.yaml -o small
#
# Not built by the tests.
FROM python:3.12-slim

# The compiler builds the CPU kernels for the processor that the container runs on.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /src
COPY pyproject.toml README.md LICENSE constraints.txt ./
COPY src ./src
RUN pip install --no-cache-dir --constraint constraints.txt '.[serve]'

RUN useradd --create-home smelt && mkdir /models && chown smelt /models
USER smelt
WORKDIR /models
EXPOSE 8000
ENTRYPOINT ["smelt"]
CMD ["--help"]
