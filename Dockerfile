# syntax=docker/dockerfile:1
# CPU:  docker build -t ppo-lightning .
# CUDA: docker build -t ppo-lightning --build-arg TORCH_INDEX=https://pypi.org/simple .
ARG PYTHON=3.11
FROM python:${PYTHON}-slim AS build
WORKDIR /build
RUN pip install --no-cache-dir hatchling==1.33.0
COPY pyproject.toml README.md LICENSE ./
COPY ppo_lightning ppo_lightning
COPY configs configs
COPY zoo zoo
COPY benchmarks/results benchmarks/results
RUN pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir dist .

FROM python:${PYTHON}-slim
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG EXTRAS=envpool
RUN useradd --create-home --uid 1000 ppo
COPY constraints.txt /tmp/constraints.txt
# PyTorch is a layer of its own: it has most of the bytes, and changes less often than the package. PyPI has
# CUDA wheels for Linux; a wheel from TORCH_INDEX has precedence, because 2.13.0+cpu is newer than 2.13.0.
RUN pip install --no-cache-dir --constraint /tmp/constraints.txt --extra-index-url ${TORCH_INDEX} torch
RUN --mount=type=bind,from=build,source=/build/dist,target=/dist \
    pip install --no-cache-dir --constraint /tmp/constraints.txt "$(echo /dist/*.whl)[${EXTRAS}]"
USER 1000
WORKDIR /home/ppo
ENTRYPOINT ["ppo-lightning"]
CMD ["recipes"]
