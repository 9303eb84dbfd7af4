# A first try on a machine with Docker, whatever it runs:
#
#   docker build -t accelerate-cpp .          installs packages and LibTorch, builds, trains once
#   docker run --rm accelerate-cpp            trains again: two processes learn to read digits
#   docker run --rm -it accelerate-cpp bash   look around; `make help`
FROM debian:12

RUN apt-get update \
 && apt-get install -y --no-install-recommends ca-certificates git make \
 && rm -rf /var/lib/apt/lists/*
WORKDIR /accelerate

# Packages and LibTorch first: a change of the source does not fetch them again.
COPY tools ./tools
RUN tools/setup.sh --build

COPY . .
RUN make demo
CMD ["make", "demo"]
